"""Layers beside a model's own: `hot` holds LoRAs that are exchanged in place."""
