"""What holds of every fused transformer, on a CPU, where plain PyTorch computes what the kernels do."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.fused_unets import size
from tests.unit.fused import (
    test_flux,
    test_flux2,
    test_krea2,
    test_later_models,
    test_qwen_image,
    test_qwen_image21,
    test_sd3,
    test_z_image,
)
from tests.unit.fused.rounded import attend_in_e4m3, outliers, round_by_row
from vivace.architectures import ARCHITECTURES
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.fused import operations
from vivace.machinery.fused.forms import form_of
from vivace.machinery.kernels import reference
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

target = test_flux.target


def first_output(made: Any, arguments: dict[str, Any]) -> torch.Tensor:
    return made(**arguments)[0]


@dataclass(frozen=True)
class Form:
    """A fused form: how a small transformer is made and called, and what is known of it.

    Attributes:
        cases: arguments; `in_fp8` tells of each whether attention is computed in fp8 where it can be.
        run: returns what it makes of an image, (batch, ...).
        allowed: the largest relative error in bf16, and in fp8.
        chains: its lists of blocks; layers with `apart` in their name are no part of them.
        plain: the case that outliers are tried on.
        bounded: arguments for the bound of activations, and how many tensors are rounded.
        bytes_in_fp8: of those in bf16 with all weights; None: not compared.
        padding: bytes of weights that fusing adds in bf16.
    """

    make: Callable[[], Any]
    cases: Sequence[dict[str, Any]]
    in_fp8: Sequence[bool] = ()
    num_attentions: int = 3
    run: Callable[[Any, dict[str, Any]], torch.Tensor] = first_output
    allowed: tuple[float, float] = (0.015, 0.07)
    chains: tuple[str, ...] = ("transformer_blocks",)
    apart: str = "adaLN"
    plain: int = 1
    bounded: tuple[dict[str, Any], int] | None = None
    bytes_in_fp8: float | None = None
    padding: int = 0
    attend: Callable[..., None] = attend_in_e4m3


def strong(
    arguments: dict[str, Any], name: str = "hidden_states", every: int = 5, axis: int = 1
) -> dict[str, Any]:
    """Make some of the inputs a thousand times as large."""
    arguments[name][(slice(None),) * axis + (slice(None, None, every),)] *= 1000
    return arguments


def attend_in_groups(q: Any, k: Any, v: Any, *more: Any, **named: Any) -> None:
    """Krea 2's keys and values are for two heads of queries each."""
    assert (q.shape[2], k.shape[2]) == (test_krea2.HEADS, test_krea2.KEY_HEADS)
    k, v = (each.view(torch.uint8).repeat_interleave(2, dim=2).view(q.dtype) for each in (k, v))
    attend_in_e4m3(q, k, v, *more, **named)


_SD3_PADDING = 4 * (test_sd3.HEADS * test_sd3.CHANNELS) ** 2 * 2
"""Of the last text two vectors of modulations, of six."""
FORMS: dict[str, Form] = {
    "flux": Form(
        test_flux.transformer,
        [test_flux.inputs(*case) for case in ((1, 128, 8, 8), (2, 7, 5, 9), (1, 1, 1, 1), (3, 16, 4, 2))],
        bytes_in_fp8=0.6,
    ),
    "flux2": Form(
        test_flux2.transformer,
        [test_flux2.inputs(*case) for case in ((1, 128, 8, 8), (2, 7, 5, 9), (1, 1, 1, 1), (3, 16, 4, 2))],
        chains=("transformer_blocks", "single_transformer_blocks"),
        bounded=(strong(test_flux2.inputs(2, 7, 5, 9)), 2 * 4 + 2 * 2),
        bytes_in_fp8=0.7,
    ),
    "krea2": Form(
        test_krea2.transformer,
        test_krea2.CASES,
        (True, True, True, True),
        allowed=(0.015, 0.08),
        bounded=(strong(test_krea2.inputs((7, 7), 9, 5, 9)), 3 * 4),
        attend=attend_in_groups,
    ),
    "qwen_image": Form(
        test_qwen_image.transformer,
        test_qwen_image.CASES,
        (True, True, False, True),
        apart="_mod.",
        plain=3,
        bounded=(strong(test_qwen_image.inputs((7, 7), (5, 9))), 3 * 5),
        bytes_in_fp8=0.56,
    ),
    "qwen_image21": Form(
        test_qwen_image21.transformer,
        test_qwen_image21.CASES,
        (True, True, False, True),
        run=lambda made, arguments: torch.cat(test_qwen_image21.steps(made, arguments)),
        plain=3,
        bounded=(test_qwen_image21.inputs((7,), (4, 6), (2, 4), (6, 10)), 2 * 3 * 4),
    ),
    **{
        f"sd3-{kind}": Form(
            lambda kind=kind: test_sd3.transformer(kind),
            test_sd3.CASES,
            (True, True, True, True),
            num_attentions=3 + len(doubled),
            apart="norm1",
            bounded=(strong(test_sd3.inputs(2, 7, 5, 9), every=3), 3 * 5 - 1 + 3 * len(doubled)),
            bytes_in_fp8=0.56,
            padding=_SD3_PADDING,
        )
        for kind, doubled in test_sd3.KINDS.items()
    },
    "z_image": Form(
        test_z_image.transformer,
        [
            test_z_image.inputs(*case)
            for case in (
                ((40,), 16, 16),
                ((9,), 10, 18),
                ((7, 90), 10, 18),
                ((3, 3, 3), 2, 2),
                ((64, 1), 16, 2),
            )
        ],
        run=lambda made, arguments: test_z_image.stacked(made(**arguments)),
        allowed=(0.02, 0.08),
        chains=("noise_refiner", "context_refiner", "layers"),
        bounded=(test_z_image.inputs((9,), 10, 18), 5 * 4),
    ),
    **{
        name: Form(
            lambda name=name: test_later_models.transformer(name),
            [inputs(*case) for case in test_later_models.CASES],
            {"longcat_image": (True, True, True), "ernie_image": (True, True, True)}.get(name, ()),
            num_attentions=5 if name == "longcat_image" else 3,
            allowed=(0.02, 0.08),
        )
        for name, (_, _, inputs) in test_later_models.FORMS.items()
    },
}
EACH = pytest.mark.parametrize("name", FORMS)


def fused(form: Form, precision: str, attention: str = "sdpa") -> Any:
    made = form.make()
    Fused(precision=precision, **({"attention": attention} if attention != "sdpa" else {})).apply(
        target(made)
    )
    return made


def of_image(form: Form, name: str, output: torch.Tensor, number: int) -> torch.Tensor:
    """Return the part of an output that is the image's: what a padded text becomes is nobody's."""
    if name not in test_later_models.FORMS:
        return output
    _, height, width = test_later_models.CASES[number]
    return output[:, -height * width :]


@EACH
@torch.no_grad()
def test_same_output_as_diffusers(name: str) -> None:
    form = FORMS[name]
    plain, made = form.make(), {precision: fused(form, precision) for precision in ("bf16", "fp8")}
    for number, arguments in enumerate(form.cases):
        expected = form.run(plain, arguments)
        for (precision, each), allowed in zip(made.items(), form.allowed, strict=True):
            output = form.run(each, arguments)
            assert output.dtype == torch.float32
            assert output.shape == expected.shape
            pair = (of_image(form, name, tensor, number) for tensor in (output, expected))
            assert error(*pair) < allowed, (precision, number)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.in_fp8])
@torch.no_grad()
@pytest.mark.slow("krea2", "qwen_image", "sd3-large")
def test_attention_in_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, num_calls = FORMS[name], []

    def counted(*arguments: Any, **named: Any) -> None:
        num_calls.append(1)
        form.attend(*arguments, **named)

    monkeypatch.setattr(cudnn_fp8, "attend", counted)
    plain, made = form.make(), fused(form, "fp8", "fp8")
    for number, (arguments, in_fp8) in enumerate(zip(form.cases, form.in_fp8, strict=True)):
        num_calls.clear()
        outputs = (form.run(each, arguments) for each in (made, plain))
        assert error(*(of_image(form, name, output, number) for output in outputs)) < 0.09
        assert len(num_calls) == (form.num_attentions if in_fp8 else 0), "a mask takes attention in bf16"


@pytest.mark.parametrize("largest", [1, 50])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.bounded])
@torch.no_grad()
@pytest.mark.diagonal
def test_outlier_channels_cost_no_more_than_with_a_scale_for_each_row(name: str, largest: float) -> None:
    """Scales of norms and values are bounds: a loose one would push typical elements below e4m3's normal numbers."""
    form = FORMS[name]

    def with_outliers(change: Any = None, precision: str | None = None) -> torch.Tensor:
        made = form.make()
        for chain in form.chains:
            outliers(getattr(made, chain), largest, change, apart=form.apart)
        if precision is not None:
            Fused(precision=precision).apply(target(made))
        return form.run(made, form.cases[form.plain])

    expected, by_row = with_outliers(), with_outliers(round_by_row)
    of_bf16 = error(with_outliers(precision="bf16"), expected)
    allowed = 1.5 * (error(by_row, expected) ** 2 + of_bf16**2) ** 0.5
    assert error(with_outliers(precision="fp8"), expected) < allowed


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.bounded])
@torch.no_grad()
def test_no_activation_exceeds_its_scale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMS[name]
    assert form.bounded is not None
    arguments, number = form.bounded
    made = fused(form, "fp8")
    largest: list[float] = []
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    monkeypatch.setattr(reference, "to_e4m3", watched)
    monkeypatch.setattr(operations, "has_triton", lambda: False)
    form.run(made, arguments)
    assert len(largest) == number, "each input of a product"
    assert max(largest) <= reference.E4M3_MAX * (1 + 1e-6)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.bytes_in_fp8])
def test_weights_keep_their_size(name: str) -> None:
    form = FORMS[name]
    sixteen = form.make().bfloat16()
    before = size(sixteen) + form.padding
    Fused(precision="bf16").apply(target(sixteen))
    assert size(sixteen) == pytest.approx(before, rel=0.01)
    assert size(fused(form, "fp8")) < form.bytes_in_fp8 * before


@dataclass(frozen=True)
class Model:
    """A model of random weights whose pipeline is drawn.

    Attributes:
        share, blocks: for the prediction of memory: what is left in fp8 of the whole model; or the bytes in bf16 of
            what fp8 halves, of two blocks.
    """

    share: float | None = None
    blocks: float | None = None
    changed: dict[str, Any] = field(default_factory=lambda: {"num_layers": 2})


MODELS = {
    "flux2-klein-4b": Model(share=0.78),
    "flux2-dev": Model(),
    "krea-2-turbo": Model(blocks=2 * (2.5 + 1 + 8) * 6144**2 * 2),
    "krea-2-raw": Model(),
    "qwen-image": Model(blocks=2 * (24 + 12) * 3072**2 * 2),
    "qwen-image-edit-2511": Model(),
    "qwen-image-2.1": Model(blocks=2 * 13 * 4096**2 * 2),
    "sd35-medium": Model(),
    "z-image-turbo": Model(share=0.707),
    "chroma1-hd": Model(),
    "ernie-image": Model(),
    "ideogram-4": Model(),
    "longcat-image": Model(),
}


def latents(model: str, recipe: str) -> Any:
    return flow_models.latents(flow_models.session(model, recipe))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.slow("krea-2-raw", "flux2-dev")
def test_a_pipeline_draws_as_near_to_fp32_as_diffusers_bf16(model: str) -> None:
    """In fp8 about as near as in bf16, or with a scale for each row and output."""
    expected = flow_models.reference(model, output_type="latent")
    by_row = flow_models.session(model)
    form = form_of(by_row.pipe.transformer)
    assert form is not None
    for chain in form.chains:
        for layer in getattr(by_row.pipe.transformer, chain).modules():
            if isinstance(layer, torch.nn.Linear):
                round_by_row(layer)
    in_bf16 = psnr(latents(model, "bf16@denoiser"), expected)
    in_fp8 = min(in_bf16, psnr(flow_models.latents(by_row), expected))
    for recipe, least in (("fused(bf16)", in_bf16 - 1), ("fused(fp8)", in_fp8 - 6)):
        session = flow_models.session(model, recipe)
        assert psnr(flow_models.latents(session), expected) > least, recipe
        assert session.refuted({}) is None


@pytest.mark.parametrize("cache", ["teacache(hits=0.5)", "magcache(hits=0.5)"])
@pytest.mark.parametrize("model", [model for model in MODELS if model not in ("flux2-dev", "krea-2-raw")])
@pytest.mark.quick("*-teacache(hits=0.5)", "sd35-medium-magcache(hits=0.5)")
@pytest.mark.slow("krea*", "qwen-image-teacache*", "ernie*", "ideogram*", "longcat*", "chroma*")
def test_a_cache_of_whole_steps_goes_with_it(model: str, cache: str) -> None:
    plain, made = (flow_models.session(model, text) for text in (cache, f"fused(bf16)+{cache}"))
    expected = flow_models.latents(plain)
    by_diffusers = psnr(latents(model, f"bf16@denoiser+{cache}"), expected)
    assert psnr(flow_models.latents(made), expected) > by_diffusers - 1
    assert made.evidence()["cache_hit_rate"] == plain.evidence()["cache_hit_rate"]


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8, attention=fp8)"])
@pytest.mark.parametrize("model", [name for name, model in MODELS.items() if model.share or model.blocks])
@pytest.mark.quick("*-fused(bf16)*")
@pytest.mark.slow("krea*", "qwen-image-fused*", "flux2*")
def test_its_memory_and_work_are_predicted(model: str, recipe: str) -> None:
    about, is_fp8 = MODELS[model], "fp8" in recipe
    smaller = {model: ARCHITECTURES[model].changed(transformer=about.changed)} if about.blocks else {}
    with mock.patch.dict(ARCHITECTURES, smaller) if smaller else contextlib.nullcontext():
        located = find_weightless(f"synthetic:{model}")
        plain, made = (predict(located, resolve(text), text="embeddings") for text in ("baseline", recipe))
    if about.share is not None:
        assert made.model_bytes / plain.model_bytes == pytest.approx(about.share if is_fp8 else 1, abs=0.02)
        assert made.peak_bytes < 1.02 * plain.peak_bytes
    if about.blocks is not None:
        saved = plain.model_bytes - made.model_bytes
        assert saved == pytest.approx(about.blocks / 2 if is_fp8 else 0, abs=0.02 * about.blocks)
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, made)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.02), "texts are padded to one of a few lengths"
