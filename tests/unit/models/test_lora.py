"""LoRAs merged into a denoiser's weights, in each layout in which they are published."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import shrunken
from vivace.errors import UnusableModel
from vivace.models.lora import merge

RANK, ALPHA = 4, 2.0
BLOCK = "down_blocks.1.attentions.0"
LAYERS = (
    f"{BLOCK}.proj_in",
    f"{BLOCK}.transformer_blocks.0.attn1.to_q",
    f"{BLOCK}.transformer_blocks.0.attn2.to_out.0",
    f"{BLOCK}.transformer_blocks.0.ff.net.2",
    "down_blocks.0.resnets.0.conv1",
)


@pytest.fixture
def pipe() -> Any:
    return shrunken.sdxl()


def write(pipe: Any, path: Path, layout: str, layers: tuple[str, ...] = LAYERS) -> dict[str, torch.Tensor]:
    """A random LoRA; the changes of the weights that it means."""
    torch.manual_seed(0)
    state, changes = {}, {}
    for layer in layers:
        weight = pipe.unet.get_submodule(layer).weight
        down, up = torch.randn(RANK, *weight.shape[1:]), torch.randn(weight.shape[0], RANK)
        scale = ALPHA / RANK if layout == "kohya" else 1.0
        changes[f"{layer}.weight"] = scale * torch.einsum("or,r...->o...", up, down)
        stored = up.reshape(*up.shape, *[1] * (weight.dim() - 2))
        if layout == "kohya":
            prefix, names = "lora_unet_" + layer.replace(".", "_"), ("lora_down", "lora_up")
            state[f"{prefix}.alpha"] = torch.tensor(ALPHA)
        else:
            names = ("lora_A", "lora_B") if layout == "peft" else ("lora.down", "lora.up")
            prefix = f"unet.{layer}"
        state |= {f"{prefix}.{names[0]}.weight": down, f"{prefix}.{names[1]}.weight": stored}
    save_file({key: value.contiguous() for key, value in state.items()}, path)
    return changes


@pytest.mark.parametrize("layout", ["kohya", "peft", "diffusers"])
def test_the_weights_are_changed_by_what_the_lora_says(pipe: Any, tmp_path: Path, layout: str) -> None:
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}
    changes = write(pipe, tmp_path / "lora.safetensors", layout)
    assert merge(pipe, tmp_path / "lora.safetensors") == len(LAYERS)
    for key, value in pipe.unet.state_dict().items():
        expected = before[key] + changes[key] if key in changes else before[key]
        assert torch.allclose(value, expected, atol=1e-5), key


def test_the_sum_is_made_in_fp32_and_rounded_once(pipe: Any, tmp_path: Path) -> None:
    pipe.unet.half()
    before = {key: value.clone() for key, value in pipe.unet.state_dict().items()}
    changes = write(pipe, tmp_path / "lora.safetensors", "peft")
    merge(pipe, tmp_path / "lora.safetensors")
    for key, change in changes.items():
        value = pipe.unet.state_dict()[key]
        assert value.dtype == torch.float16
        assert torch.allclose(value, (before[key].float() + change).half(), rtol=1e-3)


def test_what_is_no_lora_of_this_denoiser(pipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    weight = torch.zeros(4, 4)
    for state, says in (
        (
            {f"unet.{BLOCK}.strange.lora_A.weight": weight, f"unet.{BLOCK}.strange.lora_B.weight": weight},
            "strange",
        ),
        ({f"unet.{LAYERS[1]}.lora_A.weight": weight}, "is not a LoRA for this unet"),
        (
            {
                "text_encoder.encoder.layers.0.self_attn.q_proj.lora_A.weight": weight,
                "text_encoder.encoder.layers.0.self_attn.q_proj.lora_B.weight": weight,
            },
            "changes more than the unet",
        ),
    ):
        save_file({key: value.clone() for key, value in state.items()}, path)
        with pytest.raises(UnusableModel, match=says):
            merge(pipe, path)
