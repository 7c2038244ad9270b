"""vivace: find, prove and run the fastest recipe for a text-to-image model on your GPU.

In Python:

    draw = vivace.load("tiny-sd", "tiny_vae+steps(20)")
    draw("a red circle above a blue square").images[0].save("circle.png")

    draw = vivace.apply(pipe, "bf16+cfg_cutoff(0.4)")     # any diffusers pipeline that you already have
    records = vivace.bench("tiny-sd", ["baseline", "tiny_vae"])

Importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.benchmark import bench
    from vivace.runtime import Session, apply, load
    from vivace.spec import Record

__version__ = "0.1.0"
__all__ = ["Record", "Session", "__version__", "apply", "bench", "load"]

_PLACES = {
    "Record": "vivace.spec",
    "Session": "vivace.runtime",
    "apply": "vivace.runtime",
    "bench": "vivace.benchmark",
    "load": "vivace.runtime",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import vivace` costs nothing."""
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(_PLACES[name]), name)
    raise AttributeError(f"module 'vivace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
