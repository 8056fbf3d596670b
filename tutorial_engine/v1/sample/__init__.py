"""vLLM's import paths `v1.sample.*`, see `v1`."""
