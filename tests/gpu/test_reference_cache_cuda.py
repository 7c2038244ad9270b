"""Keys and values of source images kept from an edit's first step, on a CUDA device.

`python -m pytest -m gpu tests/gpu/test_reference_cache_cuda.py`
"""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)

import vivace
from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.gpu.test_fused_cuda import flux2, inputs, inputs_of_flux2, target, transformer
from tests.gpu.test_fused_qwen_cuda import inputs_of_qwen_image, qwen_image
from tests.narrow import small
from tests.unit.fused import test_flux2
from tests.unit.fused.test_source_keys import steps, with_sources
from vivace.models.synthetic import build
from vivace.models.tasks import for_task
from vivace.techniques.fused import Fused
from vivace.techniques.reference_cache import DispatchedKeys

pytestmark = pytest.mark.gpu

PRECISIONS: list[tuple[dict[str, Any], float]] = [
    ({"precision": "bf16"}, 0.03),
    ({"precision": "fp8"}, 0.09),
    ({"precision": "fp8", "attention": "fp8"}, 0.1),
]
FASTEST = "fused(fp8, attention=fp8)"
AXES = {"flux2-klein-4b": [32] * 4}
SIDE = 512
CASES = {
    "flux": (transformer, lambda: with_sources(inputs(1, 77, 32, 48), 1000)),
    "flux2": (flux2, lambda: with_sources(inputs_of_flux2(1, 77, 32, 48), 1000)),
    "flux2-batch": (flux2, lambda: with_sources(inputs_of_flux2(2, 64, 32, 32), 1000)),
    "qwen": (qwen_image, lambda: inputs_of_qwen_image((23,), (32, 48), (40, 25))),
    "qwen-zero": (
        lambda: qwen_image(zero_cond_t=True),
        lambda: inputs_of_qwen_image((64,), (32, 48), (40, 25)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_steps_of_each_fused_form_are_diffusers(name: str) -> None:
    make, arguments_of = CASES[name]
    plain, arguments = make(), arguments_of()
    keys = DispatchedKeys(plain)
    with keys.replace_dispatch():
        expected = steps(plain, keys, arguments, 1000)
    for how, allowed in PRECISIONS:
        made = make()
        Fused(**how).apply(target(made))
        fused = steps(made, made.forward.source_keys, arguments, 1000)
        assert [error(fused[k], expected[k]) < allowed for k in range(2)] == [True, True], (
            how,
            [error(fused[k], expected[k]) for k in range(2)],
        )


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_sources_that_attend_to_themselves_alone(batch: int) -> None:
    plain = flux2(32)
    for block in plain.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in plain.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    arguments = inputs_of_flux2(batch, 77, 48, 48)
    arguments["img_ids"] = arguments["img_ids"].clone()
    arguments["img_ids"][:, :1000, 0] = 10
    expected = test_flux2.steps(plain, arguments, 1000)
    for how, allowed in PRECISIONS:
        made = flux2(32)
        Fused(**how).apply(target(made))
        errors = [
            error(*pair) for pair in zip(test_flux2.steps(made, arguments, 1000), expected, strict=True)
        ]
        assert max(errors) < allowed, (how, errors)


def pipeline(model: str, kind: str = "") -> Any:
    """Return a narrow pipeline with heads that attention in fp8 takes."""
    wide = {"attention_head_dim": 128, "axes_dims_rope": AXES.get(model, [16, 56, 56])}
    pipe = build(small(model).changed(transformer=wide), "cuda", torch.bfloat16)
    return for_task(pipe, kind) if kind else pipe


def latents(session: Any, sources: int) -> np.ndarray:
    images = [flow_models.source(k).resize((SIDE, SIDE)) for k in range(sources)]
    one = type(session.pipe).__name__ == "FluxKontextPipeline"
    return session(
        flow_models.PROMPT,
        image=(images[0] if one else images) or None,
        height=SIDE,
        width=SIDE,
        num_inference_steps=4,
        generator=torch.Generator("cuda").manual_seed(0),
        output_type="latent",
    ).images.float().cpu().numpy()  # fmt: skip


PIPELINES = [
    ("flux2-klein-4b", "", "+reference_cache", (1, 3, 0)),
    ("flux2-klein-4b", "Flux2KleinKVPipeline", "", (1, 3, 0)),
    ("flux-kontext", "", "+reference_cache", (1,)),
    ("qwen-image-edit-2509", "", "+reference_cache", (1, 2)),
    ("qwen-image-edit-2511", "", "+reference_cache", (1, 2)),
]


@pytest.mark.parametrize(("model", "kind", "rest", "sources"), PIPELINES)
@pytest.mark.parametrize("recipe", ["fused(bf16)", FASTEST])
def test_captured_the_image_is_the_same(
    model: str, kind: str, rest: str, sources: tuple[int, ...], recipe: str
) -> None:
    alone = vivace.apply(pipeline(model, kind), recipe + rest)
    session = vivace.apply(pipeline(model, kind), f"{recipe}{rest}+cuda_graph@denoiser")
    images = {number: latents(alone, number) for number in sources}
    for _ in range(2):
        for number, image in images.items():
            assert psnr(latents(session, number), image) > 60, number
    assert session.evidence()["cuda_graph_replays"] > 0


@pytest.mark.parametrize(("model", "kind", "rest", "sources"), PIPELINES[:2])
def test_twenty_equal_calls_give_equal_bits(
    model: str, kind: str, rest: str, sources: tuple[int, ...]
) -> None:
    session = vivace.apply(pipeline(model, kind), f"{FASTEST}{rest}+cuda_graph@denoiser")
    first = latents(session, 3)
    for _ in range(20):
        assert np.array_equal(latents(session, 3), first)
