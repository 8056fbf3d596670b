"""vLLM's import paths `v1.*`: its current engine lives there. The files here only carry vLLM's names."""
