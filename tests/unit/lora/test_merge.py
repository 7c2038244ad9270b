"""LoRAs merged into a denoiser's weights, in each layout in which they are published."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import shrunken
from tests.families import build
from vivace.errors import Unsupported, UnusableModel
from vivace.machinery.lora.lora_files import digest, locate_lora, short_name
from vivace.machinery.lora.read_lora import merge, read_lora

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


def _inner(pipe: Any) -> int:
    return int(pipe.unet.mid_block.attentions[0].proj_in.weight.shape[0])


def test_alphas_and_ranks_in_the_header_count(pipe: Any, tmp_path: Path) -> None:
    """diffusers writes PEFT's configuration there, and no alphas among the tensors."""
    path = tmp_path / "lora.safetensors"
    down, up = torch.ones(RANK, _inner(pipe)), torch.ones(_inner(pipe), RANK)
    layer = "mid_block.attentions.0.proj_in"
    state = {f"unet.{layer}.lora_A.weight": down, f"unet.{layer}.lora_B.weight": up}
    for settings, scale in (
        ({"r": RANK, "lora_alpha": 2}, 2 / RANK),
        ({"r": RANK, "lora_alpha": 2, "use_rslora": True}, 2 / RANK**0.5),
        ({"r": RANK, "lora_alpha": 2, "alpha_pattern": {"attentions.0.proj_in": 6}}, 6 / RANK),
    ):
        metadata = {f"unet.{key}": value for key, value in settings.items()}
        save_file(state, path, {"lora_adapter_metadata": json.dumps(metadata)})
        assert read_lora(pipe, path).layers["denoiser"][layer].weight.scale == pytest.approx(scale)


def test_fluxs_alphas_are_not_dropped(tmp_path: Path) -> None:
    pipe = build("flux")
    layer = "transformer_blocks.0.attn.to_q"
    width = pipe.transformer.get_submodule(layer).in_features
    for prefix, roles, alpha in (
        (f"transformer.{layer}", ("lora_A", "lora_B"), f"transformer.{layer}.alpha"),
        (
            "lora_unet_double_blocks_0_img_attn_proj",
            ("lora_down", "lora_up"),
            "lora_unet_double_blocks_0_img_attn_proj.alpha",
        ),
    ):
        path = tmp_path / "lora.safetensors"
        torch.manual_seed(2)
        down, up = torch.randn(RANK, width), torch.randn(width, RANK)
        save_file(
            {
                f"{prefix}.{roles[0]}.weight": down,
                f"{prefix}.{roles[1]}.weight": up,
                alpha: torch.tensor(ALPHA),
            },
            path,
        )
        (layer,) = read_lora(pipe, path).layers["denoiser"].values()
        assert torch.allclose(layer.weight.values("cpu"), ALPHA / RANK * up @ down, atol=1e-5)  # type: ignore[attr-defined]


def test_damaged_values_and_sizes_are_refused(pipe: Any, tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    name = f"unet.{LAYERS[1]}"
    save_file(
        {f"{name}.lora_A.weight": torch.full((2, 8), torch.nan), f"{name}.lora_B.weight": torch.zeros(8, 2)},
        path,
    )
    with pytest.raises(UnusableModel, match="not finite"):
        read_lora(pipe, path)
    save_file({f"{name}.lora_A.weight": torch.zeros(2, 8), f"{name}.lora_B.weight": torch.zeros(8, 3)}, path)
    with pytest.raises(UnusableModel, match="do not go together"):
        merge(pipe, path)
    save_file({f"{name}.lora_A.weight": torch.zeros(2, 7), f"{name}.lora_B.weight": torch.zeros(9, 2)}, path)
    with pytest.raises(UnusableModel, match="matrices are 2x7 and 9x2"):
        merge(pipe, path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UnusableModel, match="truncated"):
        read_lora(pipe, path)


def test_files_folders_and_pickles(tmp_path: Path) -> None:
    for name in ("a.bin", "a.pt", "a.ckpt"):
        (tmp_path / name).write_bytes(b"cos\nsystem\n(S'true'\ntR.")
        with pytest.raises(UnusableModel, match="is a pickle, which can run code"):
            locate_lora(str(tmp_path / name))
    with pytest.raises(UnusableModel, match=r"has no \.safetensors file"):
        locate_lora(str(tmp_path))
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert locate_lora(str(tmp_path)) == tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1)}, tmp_path / "y.safetensors")
    with pytest.raises(UnusableModel, match="has 2 files"):
        locate_lora(str(tmp_path))
    assert digest(tmp_path / "x.safetensors") != digest(tmp_path / "y.safetensors")
    with pytest.raises(Unsupported, match="there is no LoRA"):
        locate_lora("nowhere.safetensors")
    (tmp_path / "z.txt").write_text("x")
    with pytest.raises(UnusableModel, match=r"not a \.safetensors file"):
        locate_lora(str(tmp_path / "z.txt"))
    assert short_name("/a/ink/pytorch_lora_weights.safetensors") == "ink"
    assert short_name("org/repo/x.y.safetensors@main") == "x.y"
