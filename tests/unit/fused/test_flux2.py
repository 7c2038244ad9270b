"""FLUX.2's fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)

import vivace
from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.targets import target_of
from tests.unit.fused.rounded import attend_in_e4m3
from tests.unit.fused.test_flux import target
from tests.unit.techniques.test_cuda_graph import GPU
from tests.unit.techniques.test_cuda_graph import apply as apply_cuda_graph
from vivace.errors import Unsupported
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.models.synthetic import fill
from vivace.models.tasks import for_task
from vivace.techniques.cuda_graph import CudaGraph
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


def steps(made: Any, arguments: dict[str, Any], num_sources: int) -> list[torch.Tensor]:
    """Return what it makes of the image in a step that keeps keys and values of source images, and in a later one."""
    first, cache = made(**arguments, kv_cache_mode="extract", num_ref_tokens=num_sources)
    own = {
        "hidden_states": arguments["hidden_states"][:, num_sources:],
        "img_ids": arguments["img_ids"][:, num_sources:],
        "timestep": arguments["timestep"] * 0.5,
    }
    (second,) = made(**arguments | own, kv_cache=cache, kv_cache_mode="cached")
    cache.clear()
    return [first, second]


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_source_images_that_attend_to_themselves_alone(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in [klein] 9B KV, with positions of their own, and a timestep of 0."""
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    plain = transformer(guidance=False)
    for block in plain.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in plain.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    arguments = inputs(batch, 5, 6, 6, guidance=False)
    arguments["img_ids"] = arguments["img_ids"].clone()
    arguments["img_ids"][:, :12, 0] = 10
    expected = steps(plain, arguments, 12)
    for how, allowed in (
        ({"precision": "bf16"}, 0.015),
        ({"precision": "fp8"}, 0.08),
        ({"precision": "fp8", "attention": "fp8"}, 0.085),
    ):
        made = transformer(guidance=False)
        Fused(**how).apply(target(made))
        for output, right in zip(steps(made, arguments, 12), expected, strict=True):
            assert error(output, right) < allowed


def kv_session(recipe: str) -> Any:
    return vivace.apply(for_task(flow_models.pipeline("flux2-klein-4b"), "Flux2KleinKVPipeline"), recipe)


def test_a_pipeline_that_keeps_its_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps, also the first, share a graph; what is in front of the first is not captured."""
    call: dict[str, Any] = {"image": [flow_models.source(1), flow_models.source(2)], "num_inference_steps": 4}
    expected, by_diffusers, fused = (
        flow_models.latents(kv_session(recipe), **call)
        for recipe in ("baseline", "bf16@denoiser", "fused(bf16)")
    )
    assert psnr(fused, expected) > psnr(by_diffusers, expected) - 1
    why = CudaGraph().unsupported(target_of(machine=GPU, pipe=kv_session("baseline").pipe))
    assert "add fused" in str(why)
    session = kv_session("fused(bf16)")
    assert CudaGraph().unsupported(target_of(machine=GPU, pipe=session.pipe)) is None
    effect = apply_cuda_graph(session.pipe, monkeypatch)
    for _ in range(2):
        assert np.array_equal(flow_models.latents(session, **call), fused)
    evidence = effect.evidence()
    assert (evidence["cuda_graphs_recorded"], evidence["cuda_graph_replays"]) == (1, 8)
    without = {"num_inference_steps": 4}
    text_alone = flow_models.latents(kv_session("fused(bf16)"), **without)
    assert np.array_equal(flow_models.latents(session, **without), text_alone)
    with pytest.raises(Unsupported, match="gives its denoiser no source images"):
        kv_session("reference_cache")


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs(1, 5, 4, 6)
    with pytest.raises(Unsupported, match="ip_adapter_image_embeds"):
        made(**arguments, joint_attention_kwargs={"ip_adapter_image_embeds": [torch.zeros(1)]})
    made(**arguments, joint_attention_kwargs={"scale": 1.0})


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
