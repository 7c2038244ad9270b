"""FLUX.2's fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.fused_unets import size
from tests.unit.fused.rounded import outliers, round_by_row
from tests.unit.fused.test_flux import target
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.fused import operations
from vivace.machinery.kernels import reference
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128


def transformer(guidance: bool = True, singles: int = 2) -> Any:
    torch.manual_seed(0)
    made = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=singles,
        num_attention_heads=HEADS,
        attention_head_dim=CHANNELS,
        joint_attention_dim=48,
        timestep_guidance_channels=32,
        guidance_embeds=guidance,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(batch: int, text: int, height: int, width: int, guidance: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.zeros(height, width, 4)
    ids[..., 1] += torch.arange(height)[:, None]
    ids[..., 2] += torch.arange(width)[None]
    words = torch.zeros(text, 4)
    words[:, 3] = torch.arange(text)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden_states": random(batch, height * width, 16),
        "encoder_hidden_states": random(batch, text, 48),
        "timestep": torch.linspace(0.7, 0.3, batch),
        "guidance": torch.full([batch], 3.5) if guidance else None,
        "img_ids": ids.reshape(1, -1, 4).expand(batch, -1, -1),
        "txt_ids": words.expand(batch, -1, -1),
        "return_dict": False,
    }


@pytest.mark.parametrize(
    ("batch", "text", "height", "width"), [(1, 128, 8, 8), (2, 7, 5, 9), (1, 1, 1, 1), (3, 16, 4, 2)]
)
@torch.no_grad()
@pytest.mark.quick("1-1-1-1", "2-7-5-9")
def test_same_output_as_diffusers(batch: int, text: int, height: int, width: int) -> None:
    arguments = inputs(batch, text, height, width)
    expected = transformer()(**arguments)[0]
    for precision, allowed in (("bf16", 0.015), ("fp8", 0.07)):
        made = transformer()
        Fused(precision=precision).apply(target(made))
        (output,) = made(**arguments)
        assert output.dtype == torch.float32
        assert error(output, expected) < allowed


@torch.no_grad()
def test_without_guidance_without_singles_and_after_fuse_qkv() -> None:
    for singles in (0, 1):
        arguments = inputs(1, 5, 4, 6, guidance=False)
        made = transformer(guidance=False, singles=singles)
        expected = made(**arguments)[0]
        made.fuse_qkv_projections()
        for precision, allowed in (("bf16", 0.015), ("fp8", 0.07)):
            fused = transformer(guidance=False, singles=singles)
            Fused(precision=precision).apply(target(fused))
            assert error(fused(**arguments)[0], expected) < allowed
        Fused(precision="bf16").apply(target(made))
        assert error(made(**arguments)[0], expected) < 0.015
        assert not [*made.transformer_blocks.parameters()], "the separate weights are gone"


@torch.no_grad()
def test_each_row_of_a_batch_is_an_image_of_its_own() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs(3, 5, 4, 6)
    (together,) = made(**arguments)
    for row in range(3):
        alone = {
            name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        assert error(made(**alone)[0], together[row : row + 1]) < 0.01


@pytest.mark.parametrize("largest", [1, 10, 50])
@torch.no_grad()
def test_outlier_channels_cost_no_more_than_with_a_scale_for_each_row(largest: float) -> None:
    """Scales of norms and values are bounds: a loose one would push typical elements below e4m3's normal numbers."""
    arguments = inputs(1, 7, 5, 9)

    def with_outliers(change: Any = None) -> Any:
        made = transformer()
        for blocks in (made.transformer_blocks, made.single_transformer_blocks):
            outliers(blocks, largest, change)
        return made

    expected, by_row = (with_outliers(change)(**arguments)[0] for change in (None, round_by_row))
    made = with_outliers()
    Fused(precision="fp8").apply(target(made))
    assert error(made(**arguments)[0], expected) < 1.5 * error(by_row, expected)


@torch.no_grad()
def test_no_activation_exceeds_its_scale() -> None:
    made = transformer()
    Fused(precision="fp8").apply(target(made))
    arguments = inputs(2, 7, 5, 9)
    arguments["hidden_states"][:, ::5] *= 1000
    largest: list[float] = []
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reference, "to_e4m3", watched)
        patched.setattr(operations, "has_triton", lambda: False)
        made(**arguments)
    assert len(largest) == 2 * 4 + 2 * 2, (
        "two norms, attention and MLP of double blocks; norm and both of single ones"
    )
    assert max(largest) <= reference.E4M3_MAX * (1 + 1e-6)
    assert min(largest) > reference.E4M3_MAX / 1000, "a bound is not that loose"


def test_weights_keep_their_size() -> None:
    sixteen, eight = transformer().bfloat16(), transformer()
    before = size(sixteen)
    Fused(precision="bf16").apply(target(sixteen))
    assert size(sixteen) == pytest.approx(before, rel=0.01)
    Fused(precision="fp8").apply(target(eight))
    assert size(eight) < 0.7 * before, "the modulations stay in bf16"


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs(1, 5, 4, 6)
    with pytest.raises(Unsupported, match="keep no keys and values of reference images"):
        made(**arguments, kv_cache_mode="extract", num_ref_tokens=4)
    with pytest.raises(Unsupported, match="ip_adapter_image_embeds"):
        made(**arguments, joint_attention_kwargs={"ip_adapter_image_embeds": [torch.zeros(1)]})
    made(**arguments, joint_attention_kwargs={"scale": 1.0})


@pytest.mark.parametrize("other", ["first_block_cache(0.1)", "compile", "int8"])
def test_what_works_on_blocks_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match="does not go with"):
        resolve(f"fused(bf16)+{other}")


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8, attention=fp8)"])
@pytest.mark.quick("fused(bf16)*")
def test_its_memory_and_work_are_predicted(recipe: str) -> None:
    model = find_weightless("synthetic:flux2-klein-4b")
    plain, fused = (predict(model, resolve(text), text="embeddings") for text in ("baseline", recipe))
    share = fused.model_bytes / plain.model_bytes
    assert share == pytest.approx(1.0 if recipe == "fused(bf16)" else 0.78, abs=0.02)
    assert fused.peak_bytes < 1.02 * plain.peak_bytes
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, fused)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.01)


def draw(model: str, recipe: str) -> Any:
    return flow_models.latents(flow_models.session(model, recipe))


@pytest.mark.parametrize("model", ["flux2-klein-4b", "flux2-dev"])
def test_a_pipeline_draws_as_near_to_fp32_as_diffusers_bf16(model: str) -> None:
    expected = flow_models.reference(model)
    by_diffusers = psnr(flow_models.draw(flow_models.session(model, "bf16@denoiser")), expected)
    for recipe, lost in (("fused(bf16)", 1), ("fused(fp8)@denoiser,vae", 3)):
        session = flow_models.session(model, recipe)
        assert psnr(flow_models.draw(session), expected) > by_diffusers - lost, recipe
        assert session.refuted({}) is None
        if "vae" in recipe:
            assert session.effects["fused@denoiser,vae"]["vae.fused_blocks"]


@pytest.mark.parametrize(
    ("model", "num_sources"),
    [("flux2-klein-4b", 1), ("flux2-klein-4b", 3), ("flux2-dev", 2), ("flux-kontext", 1)],
)
def test_source_images_are_drawn_from_as_near_to_fp32_as_diffusers_bf16(model: str, num_sources: int) -> None:
    """Their tokens are behind the image's, at positions of their own."""
    sources = [flow_models.source(k) for k in range(num_sources)]
    call: dict[str, Any] = {"image": sources if num_sources > 1 else sources[0]}
    expected, by_diffusers, in_bf16, in_fp8 = (
        flow_models.latents(flow_models.session(model, recipe), **call)
        for recipe in ("baseline", "bf16@denoiser", "fused(bf16)", "fused(fp8)")
    )
    assert psnr(flow_models.latents(flow_models.session(model), image=flow_models.source(4)), expected) < 40
    assert psnr(in_bf16, expected) > psnr(by_diffusers, expected) - 1
    assert psnr(in_fp8, expected) > psnr(by_diffusers, expected) - 4


@pytest.mark.parametrize("cache", ["teacache", "magcache"])
def test_caches_of_whole_steps_go_with_it(cache: str) -> None:
    cache = f"{cache}(hits=0.5)"
    plain, fused = (flow_models.session("flux2-klein-4b", text) for text in (cache, f"fused(bf16)+{cache}"))
    expected = flow_models.latents(plain)
    by_diffusers = psnr(draw("flux2-klein-4b", f"bf16@denoiser+{cache}"), expected)
    assert psnr(flow_models.latents(fused), expected) > by_diffusers - 1
    assert fused.evidence()["cache_hit_rate"] == plain.evidence()["cache_hit_rate"]
