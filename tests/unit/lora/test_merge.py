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
        ({f"unet.{LAYERS[1]}.lora_A.weight": weight}, "not two matrices"),
    ):
        save_file({key: value.clone() for key, value in state.items()}, path)
        with pytest.raises(UnusableModel, match=says):
            merge(pipe, path)


@pytest.mark.parametrize("layout", ["kohya", "peft", "diffusers"])
def test_text_encoders_parts_are_merged_too(pipe: Any, tmp_path: Path, layout: str) -> None:
    path = tmp_path / "lora.safetensors"
    torch.manual_seed(1)
    state: dict[str, torch.Tensor] = {}
    for number, attribute in enumerate(("text_encoder", "text_encoder_2")):
        for projection in ("q_proj", "out_proj"):
            layer = f"text_model.encoder.layers.1.self_attn.{projection}"
            width = getattr(pipe, attribute).config.hidden_size
            down, up = torch.randn(2, width), torch.randn(width, 2)
            if layout == "kohya":
                name = f"lora_te{number + 1}_{layer.replace('.', '_')}"
                state |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
                state[f"{name}.alpha"] = torch.tensor(1.0)
            else:
                roles = (
                    ("lora_A", "lora_B")
                    if layout == "peft"
                    else ("lora_linear_layer.down", "lora_linear_layer.up")
                )
                state |= {
                    f"{attribute}.{layer}.{roles[0]}.weight": down,
                    f"{attribute}.{layer}.{roles[1]}.weight": up,
                }
    if layout == "kohya":  # a file of both, as trainers write it
        state |= {"lora_unet_mid_block_attentions_0_proj_in.lora_down.weight": torch.zeros(2, _inner(pipe))}
        state |= {"lora_unet_mid_block_attentions_0_proj_in.lora_up.weight": torch.zeros(_inner(pipe), 2)}
    save_file(state, path)
    modules = {name: getattr(pipe, name) for name in ("text_encoder", "text_encoder_2")}
    before = {
        name: {k: v.clone() for k, v in module.state_dict().items()} for name, module in modules.items()
    }
    assert merge(pipe, path) == (5 if layout == "kohya" else 4)
    first = next(iter(state))
    for name, module in modules.items():
        changed = {k for k, v in module.state_dict().items() if not torch.equal(v, before[name][k])}
        assert {key.partition("encoder.")[2] for key in changed} == {
            "layers.1.self_attn.q_proj.weight", "layers.1.self_attn.out_proj.weight"
        }  # fmt: skip
        if first.startswith((f"{name}.", "lora_te1_")) and name == "text_encoder":
            key = next(k for k in changed if "q_proj" in k)
            down, up = (state[k] for k in list(state)[:2])
            scale = 0.5 if layout == "kohya" else 1.0
            assert torch.allclose(module.state_dict()[key], before[name][key] + scale * up @ down, atol=1e-5)


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


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("dora_scale", "is DoRA, which rescales"),
        ("lora_magnitude_vector", "is DoRA, which rescales"),
        ("hada_w1_a", "hada_w1_a, not hada_w1_a, hada_w1_b"),
        ("lokr_w1", "lokr_w1, not lokr_w1, lokr_w2_a"),
        ("lora_B.bias", "up_bias, not two matrices"),
    ],
)
def test_what_is_no_sum_or_not_whole_is_refused(pipe: Any, tmp_path: Path, key: str, says: str) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({f"unet.{LAYERS[0]}.{key}": torch.ones(4, 4)}, path)
    with pytest.raises(UnusableModel, match=says):
        merge(pipe, path)


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
