"""Tiny random transformers models of the three architectures."""

from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def tiny_model(architecture: str, **changes: Any) -> transformers.PreTrainedModel:
    """64 wide, 2 layers, heads of 16. Every weight is random, norms and biases included."""
    torch.manual_seed(0)
    kind = CLASSES[architecture]
    settings = {**SIZES, "head_dim": 16, **changes}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model.eval()
