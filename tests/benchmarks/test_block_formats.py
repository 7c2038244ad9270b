"""The record of NVFP4 and MXFP8: what smoothing would add is computed as SVDQuant does it."""

import torch

from benchmarks.block_formats import RECORD, _error, _smoothing, verdicts
from docgen.block_formats import section


def test_smoothing_helps_where_an_input_channel_is_an_outlier() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(32, 32, generator=generator), torch.randn(64, 32, generator=generator)
    inputs[:, 3] *= 100
    expected = inputs @ weight.T
    columns = _smoothing(inputs, weight, 0.5)
    plain = _error(weight, inputs, expected, 8)
    assert _error(weight * columns, inputs / columns, expected, 8) < plain < 0.2
    assert columns.argmax() == 3


def test_a_baseline_is_not_judged() -> None:
    assert list(verdicts([{"is_baseline": True}])) == []


def test_the_page_has_every_recipe_of_the_record() -> None:
    text = "\n".join(section(RECORD))
    for model in ("tiny-sd", "tiny-flux"):
        for recipe in ("quantize(nvfp4)", "quantize(nvfp4, rank=32)", "quantize(mxfp8)"):
            assert f"| {model} | `{recipe}` |" in text
    assert "not measured" in text
