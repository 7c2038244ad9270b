"""What a script loads is what vivace loads: each parameter, bit for bit, in the precision of a GPU too."""

from typing import Any

import pytest
import torch

from vivace.models import find_model, load, load_pipeline
from vivace.runtime import export


def parameters(pipe: Any) -> dict[str, torch.Tensor]:
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    return {f"{name}.{key}": value for name, part in parts.items() for key, value in part.named_parameters()}


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("model", ["tiny-sd", "tiny-flux", "tiny-flux-schnell"])
@pytest.mark.quick("tiny-sd-fp16", "tiny-flux-bf16", "tiny-flux-schnell-fp32")
def test_every_parameter_is_the_same(model: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, export):
        monkeypatch.setattr(module, "precision", lambda _, device: dtype)
    located = find_model(model)
    expected = parameters(load_pipeline(located, "cpu"))
    made = export.loading(located, "cpu")
    names: dict[str, Any] = {}
    for name in made.imports:
        module, _, member = name.partition(":")
        exec(f"from {module} import {member}" if member else f"import {module}", names)  # noqa: S102
    exec("\n".join(made.lines), names)  # noqa: S102
    loaded = parameters(names["pipe"])
    assert loaded.keys() == expected.keys()
    for key, value in loaded.items():
        assert value.dtype == expected[key].dtype, key
        assert torch.equal(value, expected[key]), key
    assert not any(part.training for part in names["pipe"].components.values() if hasattr(part, "training"))
