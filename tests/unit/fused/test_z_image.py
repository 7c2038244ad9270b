"""Z-Image's fused blocks against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from tests.unit.fused.test_flux import target
from vivace.errors import Unsupported
from vivace.models.synthetic import fill
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128


def transformer() -> Any:
    torch.manual_seed(0)
    made = ZImageTransformer2DModel(
        in_channels=4,
        dim=HEADS * CHANNELS,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=48,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    """Of images with texts of so many words."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x": [torch.randn(4, 1, height, width, generator=generator) for _ in words],
        "t": torch.linspace(0.3, 0.7, len(words)),
        "cap_feats": [torch.randn(number, 48, generator=generator) for number in words],
        "return_dict": False,
    }


def stacked(output: Any) -> torch.Tensor:
    return torch.stack(output[0])


@torch.no_grad()
def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs((5,), 4, 6)
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**arguments, controlnet_block_samples={0: torch.zeros(1)})
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(*(arguments[name] for name in ("x", "t", "cap_feats")), False, {0: torch.zeros(1)})
    omni = {name: [arguments[name]] for name in ("x", "cap_feats")} | {"siglip_feats": [None]}
    with pytest.raises(Unsupported, match="image_noise_mask"):
        made(**(arguments | omni), image_noise_mask=[[1]])
