"""Fused blocks with keys and values of source images that an earlier step kept, on a CPU."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fused_kernels import error
from tests.targets import target_of
from tests.unit.fused import test_flux, test_flux2, test_qwen_image
from tests.unit.fused.rounded import attend_in_e4m3
from tests.unit.fused.test_flux import target
from tests.unit.techniques.test_cuda_graph import capture
from vivace.architectures import family_of
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.compilation.captured import CapturedFunction
from vivace.machinery.fused.kept_keys import SourceKeys
from vivace.machinery.fused.operations import AttentionPreparation
from vivace.machinery.fused.scales import StepScales
from vivace.machinery.kernels.reference import TokenLayout
from vivace.techniques.fused import Fused
from vivace.techniques.reference_cache import DispatchedKeys, ReferenceCache

SOURCES = 15
"""Tokens of source images."""


def with_sources(arguments: dict[str, Any], number: int = SOURCES) -> dict[str, Any]:
    """Add so many tokens of a source image, no more than the image has, behind the image's."""
    own, ids = arguments["hidden_states"], arguments["img_ids"]
    generator = torch.Generator(own.device).manual_seed(5)
    more = torch.randn(len(own), number, own.shape[2], generator=generator, device=own.device).to(own)
    places = ids[..., :number, :].clone()
    places[..., 0] = 1
    return arguments | {
        "hidden_states": torch.cat([own, more], dim=1),
        "img_ids": torch.cat([ids, places], dim=-2),
    }


def qwen(words: tuple[int, ...]) -> dict[str, Any]:
    return test_qwen_image.inputs(words, (4, 6), (3, 5))


CASES: list[tuple[Callable[[], Any], dict[str, Any]]] = [
    (test_flux.transformer, with_sources(test_flux.inputs(1, 5, 4, 6))),
    (test_flux.transformer, with_sources(test_flux.inputs(2, 5, 4, 6))),
    (test_flux2.transformer, with_sources(test_flux2.inputs(1, 5, 4, 6))),
    (test_flux2.transformer, with_sources(test_flux2.inputs(2, 5, 4, 6))),
    (test_qwen_image.transformer, qwen((7,))),
    (test_qwen_image.transformer, qwen((7, 3))),
    (lambda: test_qwen_image.transformer(zero_cond_t=True), qwen((7,))),
]
IDS = ("flux", "flux-batch", "flux2", "flux2-batch", "qwen", "qwen-batch", "qwen-zero")


def steps(
    made: Any, keys: Any, arguments: dict[str, Any], number: int = SOURCES
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return what a first step makes of the image, what a later one makes, and how many tensors were kept."""
    family = family_of(made)
    assert family is not None
    assert family.sources is not None
    family.sources.prepare(made)
    keys.begin(number)
    first = made(**arguments)[0][:, :-number]
    kept = keys.end()
    later = {name: arguments[name] * 0.5 for name in ("timestep", "hidden_states")}
    keys.begin(0, kept)
    (second,) = made(**family.sources.without(arguments | later, number))
    keys.end()
    assert second.shape == first.shape
    return first, second, len(kept)


@pytest.mark.parametrize(("make", "arguments"), CASES, ids=IDS)
@torch.no_grad()
def test_steps_are_diffusers(
    make: Callable[[], Any], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    plain = make()
    keys = DispatchedKeys(plain)
    with keys.replace_dispatch():
        first, second, number = steps(plain, keys, arguments)
    for how, allowed in (
        ({"precision": "bf16"}, 0.015),
        ({"precision": "fp8", "attention": "fp8"}, 0.085),  # as much as of a step that computes all tokens
    ):
        made = make()
        Fused(**how).apply(target(made))
        pads = getattr(made.forward, "pads", False)
        for padded in {False, pads}:
            if pads:
                made.forward.pads = padded
            fused = steps(made, made.forward.source_keys, arguments)
            assert error(fused[0], first) < allowed
            assert error(fused[1], second) < allowed
            assert number <= fused[2] <= number + 1, "scales beside keys and values"


@pytest.mark.parametrize("zero", [False, True])
@torch.no_grad()
def test_texts_of_new_lengths_share_a_graph(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources are attended to in front of the text's padding, which is not."""
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    plain, made = (test_qwen_image.transformer(zero_cond_t=zero) for _ in range(2))
    Fused(precision="fp8", attention="fp8").apply(target(made))
    arguments = qwen((3,))
    own = arguments["hidden_states"][:, :-SOURCES]
    pipes = [SimpleNamespace(transformer=each, prepare_latents=lambda: (own,)) for each in (plain, made)]
    attached = [
        ReferenceCache().attach(target_of(pipe=pipe), lambda state, _: state.step > 0) for pipe in pipes
    ]
    graphs = CapturedFunction(made.forward.later_step, torch.device("cpu"), capture, 4)
    made.forward.later_step = graphs
    assert made.forward.pads
    for words in (3, 40, 64, 65):
        arguments = qwen((words,))
        for pipe in pipes:
            pipe.transformer._reset_stateful_cache()
            pipe.prepare_latents()
        for time in (1.0, 0.5):
            call = arguments | {"timestep": arguments["timestep"] * time}
            with attached[0].contexts["denoiser"]():
                expected = plain(**call)[0][:, : own.shape[1]]
            assert error(made(**call)[0][:, : own.shape[1]], expected) < 0.085
    assert graphs.num_captured == 2


def test_kept_values_do_not_exceed_a_later_step_s_scale() -> None:
    """The bound of a later timestep's values may be smaller than that of the kept ones."""

    def scales(*values: float) -> StepScales:
        of_values = torch.tensor([[value, 1 / value] for value in values])
        return StepScales(torch.ones(1, 2, 2), torch.ones(1), of_values, None)

    keys, tokens = SourceKeys(), TokenLayout(1, 0, 4)
    keys.begin(3)
    assert keys.cover_kept(scales(2.0, 1.0)) is not None
    for _ in range(2):
        preparation = AttentionPreparation(
            None, torch.ones(1, 2, 8), (torch.ones(4, 4),) * 2, tokens, 1, None
        )
        keys.take(torch.zeros(4, 24), preparation, (torch.ones(1, 4, 1, 8), torch.ones(1, 4, 1, 8)), False)
    kept = keys.end()
    assert [tensor.shape[1] for tensor in kept[:-1]] == [3] * 4
    keys.begin(0, kept)
    later = keys.cover_kept(scales(1.0, 4.0))
    assert later is not None
    assert later.values[:, :2].tolist() == [[2.0, 0.5], [4.0, 0.25]]
