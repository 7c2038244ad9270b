"""Fused blocks do the same in each step and at each size."""

import pytest


@pytest.fixture(autouse=True)
def _brief(short_calls: None) -> None:
    """Draw small images in few steps."""
