"""Fused UNets and VAEs against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

import functools
from typing import Any
from unittest import mock

import pytest
import torch

import vivace
from tests import families
from tests.families import draw, psnr
from tests.fused_kernels import error
from tests.fused_unets import inputs, size, target, unet, vae
from tests.narrow import shallow
from vivace.architectures import ARCHITECTURES
from vivace.errors import RecipeError, Unsupported
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import Prediction, predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

SHAPES = [(2, 7, 8, 12), (1, 1, 2, 2), (3, 5, 6, 4)]


def fused(precision: Any, linear: bool = True, convolutions: Any = "bf16") -> Any:
    made = unet(linear)
    Fused(precision=precision, convolutions=convolutions).apply(target(unet=made))
    return made


@pytest.mark.parametrize("linear", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
@pytest.mark.diagonal
def test_same_output_as_diffusers(shape: tuple[int, int, int, int], linear: bool) -> None:
    given = inputs(*shape)
    plain = unet(linear)
    wanted = plain(**given)[0]
    for block in [*plain.modules()]:
        if type(block).__name__ == "BasicTransformerBlock":
            block.forward = lambda x, *args, **kwargs: x
    assert error(plain(**given)[0], wanted) > 0.08, "the transformers matter here"
    for precision, convolutions, allowed in (
        ("bf16", "bf16", 0.015),
        ("fp8", "bf16", 0.06),
        ("fp8", "fp8", 0.07),
    ):
        (result,) = fused(precision, linear, convolutions)(**given)
        assert result.dtype == torch.float32
        assert error(result, wanted) < allowed


@torch.no_grad()
def test_each_row_of_a_batch_is_a_picture_of_its_own() -> None:
    made = fused("fp8")
    given = inputs(3, 5, 4, 6)
    (together,) = made(**given)
    for row in range(3):
        own = {name: given[name][row : row + 1] for name in ("sample", "encoder_hidden_states")}
        assert error(made(**given | own)[0], together[row : row + 1]) < 0.01


@torch.no_grad()
def test_after_fuse_qkv_and_with_a_controlnets_residuals() -> None:
    given = inputs(1, 5, 4, 6)
    plain, made = unet(), unet()
    made.fuse_qkv_projections()
    Fused(precision="bf16").apply(target(unet=made))
    shapes = [(32, 4, 6), (32, 4, 6), (32, 2, 3), (64, 2, 3)]
    generator = torch.Generator().manual_seed(5)
    residuals = tuple(torch.randn(1, *shape, generator=generator) for shape in shapes)
    given["down_block_additional_residuals"] = residuals
    given["mid_block_additional_residual"] = torch.randn(1, 64, 2, 3, generator=generator)
    assert error(made(**given)[0], plain(**given)[0]) < 0.015


def test_weights_keep_their_size() -> None:
    before = size(unet().bfloat16())
    assert size(fused("bf16")) == pytest.approx(before, rel=0.06), "what enlarges is kept twice"
    assert size(fused("fp8")) < 0.9 * before
    assert size(fused("fp8", convolutions="fp8")) < 0.65 * before


@torch.no_grad()
def test_no_normalised_activation_exceeds_its_bound() -> None:
    from vivace.machinery.fused import operations
    from vivace.machinery.kernels import reference

    made, largest = fused("fp8", convolutions="fp8"), []
    given = inputs(2, 7, 8, 12)
    given["sample"][:, :, ::3] *= 1000
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "to_e4m3", watched)
        patched.setattr(operations, "has_triton", lambda: False)
        made(**given)
    # Per block three norms, two outputs of attention and one of GEGLU; 7 transformers of a norm and two blocks. Two
    # norms of each of 8 residual blocks.
    assert len(largest) == 6 * 14 + 7 + 2 * 8
    assert max(largest) <= reference.E4M3_MAX * 1.0001


@pytest.mark.parametrize(("convolutions", "allowed"), [("bf16", 0.02), ("fp8", 0.15)])
@torch.no_grad()
def test_a_vae_decodes_and_encodes_the_same(convolutions: Any, allowed: float) -> None:
    plain, made = vae(), vae()
    technique = Fused(precision="fp8", convolutions=convolutions, targets=("vae",))
    effect = technique.apply(target(vae=made, unet=unet()))
    assert effect.changed["vae.fused_blocks"] == 5 + 7, "of the encoder and the decoder"
    # Where the decoder enlarges, and two of each of ten residual blocks.
    assert effect.changed["vae.own_convolutions"] == 1 + (0 if convolutions == "bf16" else 2 * 10)
    latents = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(3))
    wanted = plain.decode(latents, return_dict=False)[0]
    assert error(made.decode(latents, return_dict=False)[0], wanted) < allowed, (
        "diffusers' own bf16 has 0.017"
    )
    image = wanted.clamp(-1, 1)
    result = made.encode(image, return_dict=False)[0].mode()
    assert error(result, plain.encode(image, return_dict=False)[0].mode()) < allowed


def test_what_it_does_not_compute_is_refused() -> None:
    made, given = fused("bf16"), inputs(1, 5, 4, 6)
    with pytest.raises(Unsupported, match="take no attention mask"):
        made(**given, encoder_attention_mask=torch.ones(1, 5))
    with pytest.raises(Unsupported, match="ip_adapter_masks"):
        made(**given, cross_attention_kwargs={"ip_adapter_masks": [torch.zeros(1)]})
    made(**given, cross_attention_kwargs={"scale": 1.0})


def test_convolutions_in_fp8_go_with_fp8_and_where_there_are_some() -> None:
    with pytest.raises(RecipeError, match=r"write fused\(fp8, convolutions=fp8\)"):
        resolve("fused(convolutions=fp8)")
    with pytest.raises(Unsupported, match="a transformer has no convolutions"):
        families.session("flux", "fused(fp8, convolutions=fp8)")
    made = families.session("flux", "fused(fp8, convolutions=fp8)@denoiser,vae")
    assert made.effects["fused@denoiser,vae"]["vae.own_convolutions"]


def test_other_forms_are_refused() -> None:
    strange = unet()
    strange.down_blocks[0].attentions[0].transformer_blocks[0].norm_type = "ada_norm"
    reason = Fused(precision="bf16").unsupported(target(unet=strange))
    assert reason == (
        "down_blocks.0.attentions.0.transformer_blocks.0: a transformer block of another form than those of Stable "
        "Diffusion"
    )
    scaled = unet()
    scaled.mid_block.resnets[0].output_scale_factor = 2
    assert "mid_block.resnets.0: a residual block" in str(
        Fused(precision="bf16").unsupported(target(unet=scaled))
    )
    with pytest.raises(Unsupported, match="AutoencoderTiny; leave vae out"):
        vivace.load("tiny-sd", "tiny_vae+fused@denoiser,vae", device="cpu")


@pytest.mark.parametrize("other", ["compile", "int8", "fuse_qkv"])
def test_what_works_on_its_blocks_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match="fused"):
        resolve(f"fused(bf16)+{other}")


@pytest.mark.parametrize(
    "recipe",
    [
        "fused(bf16)",
        "fused@denoiser,vae",
        "fused(fp8, convolutions=fp8)@vae",
        "fused+cfg_cutoff(0.5)",
    ],
)
def test_an_embedded_model_draws_the_same_picture(recipe: str) -> None:
    kept = "baseline" if "cutoff" not in recipe else "cfg_cutoff(0.5)"
    made, plain = (families.session("sd", text) for text in (recipe, kept))
    assert psnr(draw(made), draw(plain)) > 36
    assert made.refuted({}) is None


@pytest.mark.parametrize("knobs", ["hits=0.5", "2, branch=1"])
@pytest.mark.quick("hits*")
def test_deepcache_goes_with_it(knobs: str) -> None:
    made = families.session("sd", f"fused(bf16)+deepcache({knobs})")
    reference = families.session("sd", f"deepcache({knobs})")
    call: Any = {"num_inference_steps": 8, "height": 128, "width": 128}
    assert psnr(draw(made, **call), draw(reference, **call)) > 40
    assert made.refuted({}) is None
    assert made.evidence()["cache_hit_rate"] == reference.evidence()["cache_hit_rate"] > 0.3


@functools.cache
def predicted(recipe: str) -> Prediction:
    """Of SDXL in its full width with fewer blocks."""
    with mock.patch.dict(ARCHITECTURES, {"sdxl": shallow("sdxl")}):
        return predict(find_weightless("synthetic:sdxl"), resolve(recipe), text="embeddings")


@pytest.mark.parametrize(
    ("recipe", "share"),
    [("fused(bf16)", 1.0), ("fused(fp8)@denoiser,vae", 0.816), ("fused(fp8, convolutions=fp8)", 0.683)],
)
@pytest.mark.quick("fused(fp8)@*")
def test_its_memory_is_predicted_without_its_packages(recipe: str, share: float) -> None:
    plain, result = predicted("baseline"), predicted(recipe)
    assert result.model_bytes / plain.model_bytes == pytest.approx(share, abs=0.02)
    assert result.peak_bytes < 1.05 * plain.peak_bytes
    works = {
        kind: [
            sum(getattr(work, kind) for work in of.work.components if work.component == "denoiser")
            for of in (plain, result)
        ]
        for kind in ("gemm_flop", "attention_flop")
    }
    # Of SDXL's text the products with keys' and values' weights are counted once, not in each of 50 steps.
    of_text = 2 * (2 * 77) * 2048 * 2 * (5 * 640 + 12 * 1280)
    assert works["gemm_flop"][1] == pytest.approx(works["gemm_flop"][0] - 49 * of_text, rel=0.002), (
        "its products are counted where nothing is multiplied"
    )
    assert works["attention_flop"][1] == pytest.approx(works["attention_flop"][0], rel=0.01)
