"""vLLM's import path of the interface for custom logits processors; it is defined in `logits_processor.py`."""

from tutorial_engine.logits_processor import AdapterLogitsProcessor as AdapterLogitsProcessor
from tutorial_engine.logits_processor import BatchUpdate as BatchUpdate
from tutorial_engine.logits_processor import LogitsProcessor as LogitsProcessor
from tutorial_engine.logits_processor import MoveDirectionality as MoveDirectionality
