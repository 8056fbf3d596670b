"""vLLM's import paths `v1.engine.*`, see `v1`."""
