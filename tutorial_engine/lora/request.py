"""`LoRARequest`: which adapter a request wants. Names and rules are vLLM's (`vllm.lora.request`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class LoRARequest:
    """An adapter by name, number and place. Two requests mean the same adapter if their names are equal.

    Attributes:
        lora_name: unique name, also the model name that a server's client asks for.
        lora_int_id: unique number, at least 1: 0 is the model without an adapter.
        lora_path: folder with adapter_config.json and adapter_model.safetensors.

    Raises:
        ValueError: a number below 1. AssertionError: an empty path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id must be at least 1 (0 is the model without an adapter), got "
                             f"{self.lora_int_id}.")
        assert self.lora_path, "lora_path must name the adapter's folder."

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)
