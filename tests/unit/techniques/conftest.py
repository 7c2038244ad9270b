"""Large models with few blocks, for predictions of their memory."""

import pytest


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every published architecture in full width with fewer blocks: predicted in a fifth of the time."""
    from tests import narrow
    from vivace.architectures import ARCHITECTURES

    for name in tuple(ARCHITECTURES):
        monkeypatch.setitem(ARCHITECTURES, name, narrow.shallow(name))


@pytest.fixture
def fresh_compiler() -> None:
    """Count what one test compiles."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
