"""A recipe that is refused half way leaves the pipeline as it was, or says that it did not."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.conditioned import as_pipeline, picture, with_controlnets
from tests.families import build, draw
from vivace.errors import Unsupported, VivaceError


def attributes_of(pipe: Any) -> dict[str, Any]:
    """Return the names of everything that hangs on the pipeline, its scheduler and its modules, and their hooks."""
    names: dict[str, Any] = {
        "pipe": set(vars(pipe)),
        "scheduler": (type(pipe.scheduler), set(vars(pipe.scheduler))),
    }
    for part, network in pipe.components.items():
        if isinstance(network, torch.nn.Module):
            for name, module in network.named_modules():
                hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
                names[f"{part}.{name}"] = type(module), set(vars(module)), set(module._parameters), hooks
    return names


@functools.cache
def whole() -> np.ndarray:
    """Return what the baseline draws."""
    return draw(vivace.apply(build("sd")))


@pytest.mark.parametrize(
    "recipe",
    [
        "deepcache(branch=90)+prompt_cache",
        "faster_cache+scheduler(edm_euler)",
        "prompt_cache+channels_last+cfg_cutoff(0.5)+scheduler(flow_euler)",
        "deepcache+scheduler(edm_euler)",
        "compile(backend=eager)+attention(cudnn)",
    ],
)
@pytest.mark.slow("deepcache+scheduler*", "compile*")
def test_what_can_be_put_back_is(recipe: str) -> None:
    pipe = build("sd")
    before = attributes_of(pipe)
    with pytest.raises(VivaceError) as caught:
        vivace.apply(pipe, recipe)
    if "load it again" in str(caught.value):
        assert "channels_last" in recipe, "it lays weights out anew"
        return
    assert attributes_of(pipe) == before
    assert np.array_equal(draw(vivace.apply(pipe)), whole())
    with pytest.raises(VivaceError):
        vivace.apply(pipe, recipe)


@pytest.mark.parametrize("recipe", ["bf16+scheduler(edm_euler)", "quantize(int8)+scheduler(edm_euler)"])
def test_of_changed_weights_the_error_says_so(recipe: str) -> None:
    with pytest.raises(
        Unsupported, match=r"not compatible.*weights of the pipeline have been changed.*load it again"
    ):
        vivace.apply(build("sd"), recipe)


def test_an_error_of_another_library_puts_the_pipeline_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from vivace.techniques.prompt_cache import PromptCache

    def fail(*_: Any) -> Any:
        raise RuntimeError("halfway")

    monkeypatch.setattr(PromptCache, "apply", fail)
    pipe = build("sd")
    before = attributes_of(pipe)
    with pytest.raises(RuntimeError, match="halfway"):
        vivace.apply(pipe, "deepcache+prompt_cache")
    assert attributes_of(pipe) == before


def test_a_unet_that_torch_compile_wrapped_keeps_its_blocks() -> None:
    pipe = build("sd")
    pipe.unet = torch.compile(pipe.unet, backend="eager")
    blocks = len(pipe.unet.down_blocks), len(pipe.unet.up_blocks)
    with pytest.raises(Unsupported, match="_orig_mod"):
        vivace.apply(pipe, "deepcache")
    assert (len(pipe.unet.down_blocks), len(pipe.unet.up_blocks)) == blocks
    assert next(pipe.unet.parameters()).shape
    pipe.unet = pipe.unet._orig_mod
    assert draw(vivace.apply(pipe, "deepcache")).shape == (1, 64, 64, 3)


# precisions of modules beside the denoiser


CALL: dict[str, Any] = {"num_inference_steps": 2, "guidance_scale": 5.0, "output_type": "np"}


@pytest.mark.parametrize("recipe", ["bf16@denoiser", "bf16", "bf16@text_encoder", "bf16@vae"])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.quick("1-bf16@denoiser", "2-bf16")
def test_precisions_with_controlnets(recipe: str, number: int) -> None:
    images = [picture(), picture(1)][:number]
    call = CALL | {"image": images if number > 1 else images[0]}
    whole = vivace.apply(with_controlnets(build("sd"), number))
    made = vivace.apply(with_controlnets(build("sd"), number), recipe)
    drawn = [
        np.asarray(each(prompt="a red circle", generator=torch.Generator().manual_seed(0), **call).images)
        for each in (whole, made)
    ]
    assert np.isfinite(drawn[1]).all()
    assert next(made.pipe.controlnet.parameters()).dtype == torch.float32
    if recipe != "bf16":  # whose noise is other noise
        assert 0 < float(((drawn[0] - drawn[1]) ** 2).mean()) < 0.01


@pytest.mark.parametrize("recipe", ["bf16", "bf16@denoiser"])
def test_precisions_with_a_t2i_adapter(recipe: str) -> None:
    from tests.conditioned import case

    pipe, call = case("t2i_adapter")
    made = vivace.apply(pipe, recipe)
    images = np.asarray(
        made(prompt="a red circle", generator=torch.Generator().manual_seed(0), **CALL, **call).images
    )
    assert np.isfinite(images).all()


def test_projections_of_pag_are_not_fused() -> None:
    none: dict[str, Any] = {"safety_checker": None, "feature_extractor": None}
    pipe = as_pipeline(build("sd"), "StableDiffusionPAGPipeline", **none)
    with pytest.raises(Unsupported, match="StableDiffusionPAGPipeline replaces attention processors"):
        vivace.apply(pipe, "fuse_qkv")
    made = vivace.apply(pipe, "fuse_qkv@vae")
    assert made(prompt="a red circle", height=64, width=64, **CALL).images.shape == (1, 64, 64, 3)


@pytest.mark.parametrize("branch", [0, 4])
def test_deepcache_with_freeu_reuses_what_it_kept(branch: int) -> None:
    """FreeU writes into the features that it gets; with a kept one, hits in a row would drift."""
    pipe = build("sd")
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.5, b2=1.6)
    made = vivace.apply(pipe, f"deepcache(interval=4, branch={branch})")
    kept: list[torch.Tensor] = []
    states = made.pipe.unet._reset_stateful_cache.__self__._states

    def look(*_: Any) -> dict[str, Any]:
        kept.append(states["cond"].kept[0].clone())
        return {}

    draw(made, num_inference_steps=4, callback_on_step_end=look)
    assert len(kept) == 4
    assert all(torch.equal(each, kept[0]) for each in kept)
    assert made.evidence()["cache_hit_rate"] == 0.75


@pytest.mark.parametrize("kind", ["sliced", "eager"])
def test_attention_that_asks_no_kernel_is_refused(kind: str) -> None:
    from diffusers.models.attention_processor import AttnProcessor

    pipe = build("sd")
    if kind == "sliced":
        pipe.enable_attention_slicing(1)
    else:
        pipe.unet.set_attn_processor(AttnProcessor())
    with pytest.raises(Unsupported, match="asks no kernel"):
        vivace.apply(pipe, "attention(math)")
