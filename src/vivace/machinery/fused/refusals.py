"""What calls of fused transformers are refused for."""

from __future__ import annotations

from typing import Any

from vivace.errors import Unsupported


def refuse_controlnet(*samples: Any) -> None:
    """Refuse what a ControlNet adds to blocks.

    Args:
        samples: the arguments of a forward that hold it; None where there is none.

    Raises:
        Unsupported: there is any.
    """
    if any(each is not None for each in samples):
        raise Unsupported(
            "fused: the fused blocks take no ControlNet; leave fused out, or call without control images"
        )


def refuse_extras(attention_kwargs: dict[str, Any] | None) -> None:
    """Refuse what the fused blocks do not compute.

    Raises:
        Unsupported: there is any.
    """
    extras = [name for name, value in (attention_kwargs or {}).items() if (name, value) != ("scale", 1.0)]
    if extras:
        raise Unsupported(
            f"fused: the fused blocks take no attention_kwargs ({', '.join(extras)}); leave fused out, or call "
            "without adapters"
        )
