"""VAEs that overflow in fp16: SDXL's pipelines cast them to fp32 for the decoding, and back."""

from __future__ import annotations

from typing import Any


def is_cast_in_call(pipe: Any) -> bool:
    """Whether the pipeline casts its VAE as it is now in each call: one in fp16 whose configuration asks for it."""
    import torch

    vae = getattr(pipe, "vae", None)
    return bool(
        vae is not None
        and hasattr(type(pipe), "upcast_vae")
        and vae.config.get("force_upcast")
        and vae.dtype == torch.float16
    )
