"""Small UNets and VAEs whose fused forms are compared with diffusers', on any device."""

from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel

from tests.targets import target_of
from vivace.machinery.technique import Target
from vivace.measure.machine import this_machine
from vivace.models.synthetic import fill

TEXT = 48


class Pipe:
    def __init__(self, **parts: Any) -> None:
        self.scheduler = None
        for name, part in parts.items():
            setattr(self, name, part)


def unet(linear: bool = True, device: str = "cpu") -> Any:
    """Two levels, two transformer blocks each, which contribute as much as the convolutions do."""
    made = UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT,
        attention_head_dim=(2, 4),
        use_linear_projection=linear,
        norm_num_groups=8,
        transformer_layers_per_block=2,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
        for name, weight in made.named_parameters():
            if "proj_out" in name or ".to_out." in name or ".ff.net.2" in name:
                weight.mul_(4)
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)))
    return made.eval().requires_grad_(False).to(device)


def vae(device: str = "cpu") -> Any:
    made = AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        norm_num_groups=8,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False).to(device)


def inputs(batch: int, words: int, height: int, width: int, device: str = "cpu") -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "sample": torch.randn(batch, 4, height, width, generator=generator).to(device),
        "timestep": torch.tensor(321.0, device=device),
        "encoder_hidden_states": torch.randn(batch, words, TEXT, generator=generator).to(device),
        "return_dict": False,
    }


def target(device: str = "cpu", **parts: Any) -> Target:
    return target_of(pipe=Pipe(**parts), machine=this_machine(device))


def size(module: Any) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
