"""From a name to weights: find a model, read its files, describe it, build it.

    default_model ─┐
    (hub, folder)  ├─► loader.resolve_model ─► ModelSource ─┬─ .config      ─► config.ModelConfig ─┐
    gguf ──────────┘                                        ├─ .weights()   ───────────────────────┴─► decoder
                                                            └─ .tokenizer() ─► tokenizer

Importing this package imports none of its modules, so that asking for a `ModelConfig` does not load torch.
"""
