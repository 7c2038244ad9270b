"""FLUX.2's fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.unit.fused.test_flux import target
from vivace.errors import Unsupported
from vivace.models.synthetic import fill
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


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs(1, 5, 4, 6)
    with pytest.raises(Unsupported, match="keep no keys and values of reference images"):
        made(**arguments, kv_cache_mode="extract", num_ref_tokens=4)
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
