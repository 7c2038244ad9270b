"""Recipes applied to pipelines. `Session` is the only caller of a technique's `apply`."""

from vivace.runtime.session import Session, apply, load

__all__ = ["Session", "apply", "load"]
