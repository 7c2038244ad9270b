"""Components of different precision: inputs are cast on entry, without a look at the whole component in every step."""

from typing import Any

import pytest
import torch

import vivace
from tests.families import build, draw


def test_a_step_does_not_ask_the_denoiser_for_its_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    session = vivace.apply(build("sd"), "dtype(bf16)@denoiser")
    lookups: list[Any] = []

    def dtype(unet: Any) -> torch.dtype:
        lookups.append(unet)
        return torch.bfloat16

    monkeypatch.setattr(type(session.pipe.unet), "dtype", property(dtype))
    counts = []
    for steps in (1, 4):
        lookups.clear()
        draw(session, num_inference_steps=steps)
        counts.append(len(lookups))
    assert counts[0] == counts[1]
