"""LoRA adapters (Hu et al., arXiv 2106.09685). So far: how a request names one; serving them is refused."""
