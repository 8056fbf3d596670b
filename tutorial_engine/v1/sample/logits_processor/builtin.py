"""vLLM's import path of `process_dict_updates`; it is defined in `logits_processor.py`."""

from tutorial_engine.logits_processor import process_dict_updates as process_dict_updates
