"""What caches of UNets have in common that compute every other step and reuse in between. For their tests."""

import numpy as np
import pytest

import vivace
from tests.families import build, draw, drawn, psnr, session
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph

COMPANY = (
    "bf16", "bf16@denoiser", "int8", "layerwise_casting", "fuse_qkv", "attention(math)", "inference_mode",
    "scheduler(heun)", "prompt_cache",
)  # fmt: skip
"""Recipes that such a cache has to work beside."""


def check_recorded(family: str, cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a computed step and a hit are a CUDA graph each, and draw what they draw unrecorded."""
    alone = drawn(family, cache, num_inference_steps=4)
    pipe = build(family)
    made = vivace.apply(pipe, cache)
    effect = apply_cuda_graph(pipe, monkeypatch)
    for _ in range(2):
        assert psnr(draw(made, num_inference_steps=4), alone) > 90
    assert effect.evidence() == {"cuda_graphs_recorded": 2, "cuda_graph_replays": 8}


def check_it_composes(family: str, cache: str, company: str) -> None:
    """That it hits beside another technique, and the picture stays one."""
    alone = drawn(family, company, num_inference_steps=4)
    both = session(family, f"{cache}+{company}")
    picture = draw(both, num_inference_steps=4)
    assert np.isfinite(picture).all()
    assert 10 < psnr(picture, alone) < 100
    assert 0 < float(both.evidence()["cache_hit_rate"]) <= 0.5
