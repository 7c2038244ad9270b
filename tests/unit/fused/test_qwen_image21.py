"""Qwen-Image 2.1's fused blocks against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImage21Transformer2DModel
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.targets import target_of
from tests.unit.fused.rounded import attend_in_e4m3
from tests.unit.fused.test_flux import target
from tests.unit.techniques.test_cuda_graph import GPU, capture
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.compilation.captured import CapturedFunction
from vivace.models.synthetic import fill
from vivace.techniques.cuda_graph import CudaGraph
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128
LAYERS = 3
MODEL = "qwen-image-2.1"
TIMES = (0.75, 0.5)
"""In bf16 as they are."""


def transformer(causal: bool = True, num_layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    made = QwenImage21Transformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=num_layers,
        num_attention_heads=HEADS,
        attention_head_dim=CHANNELS,
        context_in_dim=48,
        causal_condition=causal,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(
    words: tuple[int, ...],
    *shapes: tuple[int, int],
    channels: tuple[int, int] = (16, 48),
    like: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Of images with texts of so many words, the last; shapes of those to be edited and of the image, in tokens.

    An image to be edited takes a place among the words for each four of its tokens, behind two words.

    Args:
        channels: of latents and of the text.
        like: has their device and dtype.
    """
    like = torch.zeros(0) if like is None else like
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(like)

    batch, counts = len(words), [height * width for height, width in shapes]
    slots: list[bool] = []
    for count in counts[:-1]:
        slots += [False] * 2 + [True] * (count // 4)
    slots += [False] * max(words)
    places = torch.tensor(slots + [True] * (counts[-1] // 4), device=like.device).expand(batch, -1)
    mask = torch.arange(len(slots))[None] < torch.tensor(words)[:, None] + len(slots) - max(words)
    return {
        "hidden_states": random(batch, sum(counts), channels[0]),
        "encoder_hidden_states": random(batch, len(slots), channels[1]),
        "encoder_hidden_states_mask": None if mask.all() else mask.to(like.device),
        "timestep": torch.full((batch,), TIMES[0]).to(like),
        "img_shapes": [[(1, *shape) for shape in shapes]] * batch,
        "img_mask": places,
        "return_dict": False,
    }


CASES = [
    inputs((40,), (8, 8)),
    inputs((9, 9), (6, 10)),
    inputs((3, 16), (4, 2)),
    inputs((7,), (4, 6), (2, 4), (6, 10)),
]
"""One text; two of one length; one padded to the other; an image with two to be edited."""


def steps(made: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Return what it makes of the image in a step that keeps keys and values, and in a later one."""
    cache = QwenImage21KVCache(len(made.transformer_blocks))
    count = math.prod(arguments["img_shapes"][0][-1])
    outputs = []
    for time, mode in zip(TIMES, ("extract", "cached"), strict=True):
        timestep = torch.full_like(arguments["timestep"], time)
        (output,) = made(**(arguments | {"timestep": timestep}), kv_cache=cache, kv_cache_mode=mode)
        assert output.dtype == arguments["hidden_states"].dtype
        outputs.append(output[:, -count:])
    return outputs


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_a_step_that_keeps_nothing(causal: bool) -> None:
    for arguments in CASES[1:]:
        expected = transformer(causal)(**arguments)[0]
        made = transformer(causal)
        Fused(precision="bf16").apply(target(made))
        assert error(made(**arguments)[0], expected) < 0.015


@torch.no_grad()
def test_later_steps_of_new_lengths_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values in front of the image are padded to 64 tokens, which are not attended to."""
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    made, exact, plain = transformer(), transformer(), transformer()
    Fused(precision="fp8", attention="fp8").apply(target(made))
    Fused(precision="bf16").apply(target(exact))
    graphs = CapturedFunction(made.forward.later_step, torch.device("cpu"), capture, 4)
    made.forward.later_step = graphs
    for words in (3, 40, 64, 65):
        arguments = inputs((words,), (6, 10))
        assert error(steps(made, arguments)[1], steps(plain, arguments)[1]) < 0.08
        unpadded = steps(exact, arguments)[1]
        exact.transformer_blocks[0].pads = True
        assert error(steps(exact, arguments)[1], unpadded) < 0.01
        exact.transformer_blocks[0].pads = False
    assert graphs.num_captured == 2


def test_guidance_keeps_keys_and_values_of_its_own() -> None:
    call: dict[str, Any] = {"negative_prompt": "a blue square", "true_cfg_scale": 4.0}
    expected, by_diffusers, fused = (
        flow_models.latents(flow_models.session(MODEL, recipe), **call)
        for recipe in ("baseline", "bf16@denoiser", "fused(bf16)")
    )
    assert psnr(fused, expected) > psnr(by_diffusers, expected) - 1


def test_steps_after_the_first_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for each length of what is in front of the image; prompts of one length share it."""
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    plain, session = (flow_models.session(MODEL, "fused(bf16)") for _ in range(2))
    effect = CudaGraph().apply(target_of(machine=GPU, pipe=session.pipe))
    assert effect.evidence is not None
    prompts = ["a red star", "a blue star", "a star on a field of white flowers", "a red star"]
    for number, prompt in enumerate(prompts, 1):
        assert np.array_equal(flow_models.latents(session, prompt), flow_models.latents(plain, prompt)), (
            prompt
        )
        assert effect.evidence()["cuda_graph_replays"] == number * (flow_models.STEPS - 1)
    assert effect.evidence()["cuda_graphs_recorded"] == 2
    assert effect.prompt_words == (), "in bf16 each length has a graph of its own"
    session.pipe.transformer.transformer_blocks[0].pads = True
    assert len(CudaGraph().apply(target_of(machine=GPU, pipe=session.pipe)).prompt_words) > 3


def test_steps_that_are_not_captured_are_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.machinery.compilation.captured.cuda_capturer", lambda: capture)
    session = flow_models.session(MODEL, "fused(bf16)")
    effect = CudaGraph().apply(target_of(machine=GPU, pipe=session.pipe))
    session.pipe.transformer.pos_embed.register_forward_pre_hook(lambda *_: None)
    flow_models.latents(session)
    assert effect.refuted is not None
    assert effect.refuted({}) == "the denoiser had no step that is captured"
