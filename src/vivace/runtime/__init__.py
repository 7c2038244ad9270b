"""Recipes applied to pipelines. `Session` is the only caller of a technique's `apply`."""

from vivace.runtime.opening import apply, load
from vivace.runtime.session import Session

__all__ = ["Session", "apply", "load"]
