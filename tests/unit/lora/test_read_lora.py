"""LoRAs in every layout that people have: each file is written by hand, and what it adds is computed by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.families import build
from tests.flow_models import pipeline
from vivace.errors import UnusableModel
from vivace.machinery.lora.read_lora import LoraFile, merge, merge_all, read_lora

RANK, ALPHA = 4, 2.0
Expected = dict[str, torch.Tensor]
"""What is added to a parameter, by its component's attribute and its name there."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lora.safetensors"


def pipe_of(model: str) -> Any:
    return build(model) if model in ("sd", "sdxl", "flux") else pipeline(model)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def save(state: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({key: value.clone().contiguous() for key, value in state.items()}, path, metadata)


def check_merged(pipe: Any, path: Path, expected: Expected) -> LoraFile:
    """Merge a file; every parameter must change by what is expected, and the others not at all."""
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    before = {f"{name}.{k}": v.clone() for name, part in parts.items() for k, v in part.state_dict().items()}
    lora = read_lora(pipe, path)
    assert not lora.problems
    merge_all(pipe, [(lora.layers, 1.0)])
    after = {f"{name}.{k}": v for name, part in parts.items() for k, v in part.state_dict().items()}
    assert set(expected) <= set(after)
    for key, value in after.items():
        if key in expected:
            change = expected[key].reshape(value.shape)
            assert bool(change.any())
            assert torch.allclose(value, before[key] + change, atol=1e-4), key
        else:
            assert torch.equal(value, before[key]), key
    return lora


def pair(
    layer: str, out: int, inner: tuple[int, ...], roles: str, alpha: float | None = None
) -> tuple[dict[str, Any], torch.Tensor]:
    """A layer's two matrices as tensors of a file, and what they add.

    Args:
        roles: what follows the layer's name, of A and of B, with a space between.
    """
    down, up = rand(RANK, *inner), rand(out, RANK)
    a, b = roles.split()
    state = {f"{layer}{a}": down, f"{layer}{b}": up.reshape(*up.shape, *[1] * (len(inner) - 1))}
    if alpha is not None:
        state[f"{layer}.alpha"] = torch.tensor(alpha)
    scale = 1.0 if alpha is None else alpha / RANK
    return state, scale * torch.einsum("or,r...->o...", up, down)


KOHYA = ".lora_down.weight .lora_up.weight"
PEFT = ".lora_A.weight .lora_B.weight"
NAMED = ".lora_A.default.weight .lora_B.default.weight"
DOTTED = ".lora.down.weight .lora.up.weight"
OLD = "_lora.down.weight _lora.up.weight"
BARE = ".down.weight .up.weight"
TEXT = ".lora_linear_layer.down.weight .lora_linear_layer.up.weight"
Q = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
CLIP = "encoder.layers.1.self_attn"


@pytest.mark.parametrize(
    ("model", "layer", "written", "roles", "alpha"),
    [
        # Stable Diffusion 1, as kohya's scripts name it, LyCORIS and diffusers
        ("sd", f"unet.{Q}", f"lora_unet_{Q.replace('.', '_')}", KOHYA, ALPHA),
        ("sd", f"unet.{Q}", f"lycoris_{Q.replace('.', '_')}", KOHYA, ALPHA),
        ("sd", f"unet.{Q}", f"unet.{Q}", PEFT, None),
        ("sd", f"unet.{Q}", f"unet.{Q}", DOTTED, ALPHA),
        ("sd", f"unet.{Q}", f"unet.{Q.replace('to_q', 'processor.to_q')}", OLD, None),
        ("sd", f"unet.{Q}", Q.replace("to_q", "processor.to_q"), OLD, None),
        ("sd", f"unet.{Q.replace('to_q', 'to_out.0')}", f"unet.{Q.replace('to_q', 'processor.to_out')}", OLD, None),
        ("sd", f"unet.{Q}", f"base_model.model.{Q}", PEFT, None),
        ("sd", f"unet.{Q}", f"base_model.model.{Q}", NAMED, None),
        ("sd", "unet.down_blocks.0.resnets.0.conv1", "lora_unet_down_blocks_0_resnets_0_conv1", KOHYA, ALPHA),
        ("sd", "unet.down_blocks.0.resnets.0.conv1", "lora_unet_input_blocks_1_0_in_layers_2", KOHYA, ALPHA),
        ("sd", "unet.up_blocks.0.upsamplers.0.conv", "lora_unet_up_blocks_0_upsamplers_0_conv", KOHYA, ALPHA),
        ("sd", "unet.time_embedding.linear_1", "lora_unet_time_embed_0", KOHYA, ALPHA),
        ("sd", "unet.conv_in", "lora_unet_input_blocks_0_0", KOHYA, ALPHA),
        ("sd", "unet.conv_out", "lora_unet_out_2", KOHYA, ALPHA),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"lora_te_text_model_{CLIP.replace('.', '_')}_q_proj", KOHYA, ALPHA),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"text_encoder.text_model.{CLIP}.to_q", OLD, None),
        ("sd", f"text_encoder.{CLIP}.out_proj", f"text_encoder.text_model.{CLIP}.to_out", OLD, None),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"text_encoder.text_model.{CLIP}.q_proj", TEXT, None),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"text_encoder.text_model.{CLIP}.q_proj", PEFT, None),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"base_model.model.text_model.{CLIP}.q_proj", PEFT, None),
        ("sd", f"text_encoder.{CLIP}.q_proj", f"text_encoders.clip_l.transformer.text_model.{CLIP}.q_proj", PEFT, None),
        # SDXL, in its own names and in diffusers'
        ("sdxl", f"unet.{Q}", "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", KOHYA, ALPHA),
        ("sdxl", f"unet.{Q}", f"lora_unet_{Q.replace('.', '_')}", KOHYA, ALPHA),
        ("sdxl", f"unet.{Q}", "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q", PEFT, None),
        ("sdxl", "unet.mid_block.attentions.0.proj_in", "lora_unet_middle_block_1_proj_in", KOHYA, ALPHA),
        ("sdxl", "unet.add_embedding.linear_1", "lora_unet_label_emb_0_0", KOHYA, ALPHA),
        ("sdxl", "unet.down_blocks.0.downsamplers.0.conv", "lora_unet_input_blocks_3_0_op", KOHYA, ALPHA),
        ("sdxl", f"text_encoder.{CLIP}.k_proj", f"lora_te1_text_model_{CLIP.replace('.', '_')}_k_proj", KOHYA, ALPHA),
        ("sdxl", f"text_encoder_2.text_model.{CLIP}.k_proj",
         f"lora_te2_text_model_{CLIP.replace('.', '_')}_k_proj", KOHYA, ALPHA),
        ("sdxl", f"text_encoder_2.text_model.{CLIP}.k_proj", f"text_encoder_2.text_model.{CLIP}.k_proj", PEFT, None),
        ("sdxl", f"text_encoder_2.text_model.{CLIP}.k_proj", f"base_model.model.text_model.{CLIP}.k_proj", PEFT, None),
        ("sdxl", "text_encoder_2.text_projection", "lora_te2_text_projection", KOHYA, ALPHA),
        # FLUX.1, by kohya's scripts, ai-toolkit, OneTrainer, XLabs, ComfyUI, PEFT
        ("flux", "transformer.transformer_blocks.0.attn.to_out.0",
         "lora_unet_double_blocks_0_img_attn_proj", KOHYA, ALPHA),
        ("flux", "transformer.transformer_blocks.0.attn.to_q",
         "transformer.transformer_blocks.0.attn.to_q", PEFT, None),
        ("flux", "transformer.transformer_blocks.0.attn.to_q",
         "transformer.transformer_blocks.0.attn.to_q", PEFT, ALPHA),
        ("flux", "transformer.transformer_blocks.0.ff.net.0.proj",
         "lora_transformer_transformer_blocks_0_ff_net_0_proj", KOHYA, ALPHA),
        ("flux", "transformer.transformer_blocks.0.ff_context.net.2",
         "lora_transformer_transformer_blocks_0_ff_context_net_2", KOHYA, ALPHA),
        ("flux", "transformer.single_transformer_blocks.0.proj_mlp",
         "lora_transformer_single_transformer_blocks_0_proj_mlp", KOHYA, ALPHA),
        ("flux", "transformer.transformer_blocks.0.attn.to_add_out",
         "double_blocks.0.processor.proj_lora2", BARE, None),
        ("flux", "transformer.single_transformer_blocks.0.proj_out", "single_blocks.0.processor.proj_lora", BARE, None),
        ("flux", "transformer.transformer_blocks.0.norm1.linear",
         "diffusion_model.double_blocks.0.img_mod.lin", PEFT, None),
        ("flux", "transformer.proj_out", "lora_unet_final_layer_linear", KOHYA, ALPHA),
        ("flux", "transformer.proj_out", "base_model.model.final_layer.linear", PEFT, None),
        ("flux", "transformer.time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer", PEFT, None),
        ("flux", f"text_encoder.{CLIP}.v_proj", f"lora_te1_text_model_{CLIP.replace('.', '_')}_v_proj", KOHYA, ALPHA),
        ("flux", "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
         "lora_te3_encoder_block_0_layer_0_SelfAttention_q", KOHYA, ALPHA),
        ("flux", "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q",
         "lora_te2_encoder_block_0_layer_0_SelfAttention_q", KOHYA, ALPHA),
        ("flux", "text_encoder_2.encoder.block.0.layer.1.DenseReluDense.wo",
         "text_encoders.t5xxl.transformer.encoder.block.0.layer.1.DenseReluDense.wo", KOHYA, ALPHA),
        # FLUX.2, Qwen-Image, Z-Image, Stable Diffusion 3, Sana
        ("flux2-klein-4b", "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj",
         "diffusion_model.single_blocks.0.linear1", PEFT, ALPHA),
        ("flux2-klein-4b", "transformer.transformer_blocks.0.ff.linear_in",
         "base_model.model.double_blocks.0.img_mlp.0", PEFT, None),
        ("flux2-klein-4b", "transformer.transformer_blocks.0.attn.to_q",
         "lora_unet_transformer_blocks_0_attn_to_q", KOHYA, ALPHA),
        ("flux2-klein-4b", "text_encoder.model.layers.0.self_attn.q_proj",
         "text_encoder.layers.0.self_attn.q_proj", PEFT, None),
        ("flux2-klein-4b", "text_encoder.model.layers.0.mlp.up_proj",
         "text_encoders.qwen3_4b.transformer.model.layers.0.mlp.up_proj", PEFT, None),
        ("qwen-image", "transformer.transformer_blocks.0.img_mlp.net.2",
         "transformer_blocks.0.img_mlp.net.2", KOHYA, ALPHA),
        ("qwen-image", "transformer.transformer_blocks.0.attn.to_q",
         "diffusion_model.transformer_blocks.0.attn.to_q", PEFT, ALPHA),
        ("qwen-image", "transformer.transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_q", NAMED, None),
        ("qwen-image", "transformer.transformer_blocks.0.img_mod.1",
         "lora_unet_transformer_blocks_0_img_mod_1", KOHYA, ALPHA),
        ("qwen-image", "text_encoder.model.language_model.layers.0.self_attn.q_proj",
         "text_encoder.model.layers.0.self_attn.q_proj", PEFT, None),
        ("z-image-turbo", "transformer.layers.0.attention.to_out.0",
         "diffusion_model.layers.0.attention.out", KOHYA, ALPHA),
        ("z-image-turbo", "transformer.layers.0.feed_forward.w1", "lora_unet_layers_0_feed_forward_w1", KOHYA, ALPHA),
        ("z-image-turbo", "transformer.layers.0.adaLN_modulation.0",
         "lora_unet_layers_0_adaLN_modulation_0", DOTTED, ALPHA),
        ("sd35-medium", "transformer.transformer_blocks.0.attn.to_q",
         "transformer.transformer_blocks.0.attn.to_q", PEFT, None),
        ("sd35-medium", "transformer.transformer_blocks.0.ff.net.0.proj",
         "lora_unet_joint_blocks_0_x_block_mlp_fc1", KOHYA, ALPHA),
        ("sd35-medium", "text_encoder_3.encoder.block.0.layer.0.SelfAttention.q",
         "lora_te3_encoder_block_0_layer_0_SelfAttention_q", KOHYA, ALPHA),
        ("sana-1600m", "transformer.transformer_blocks.0.attn1.to_q",
         "lora_unet_transformer_blocks_0_attn1_to_q", KOHYA, ALPHA),
    ],
)  # fmt: skip
def test_two_matrices_of_one_layer(
    model: str, layer: str, written: str, roles: str, alpha: float | None, path: Path
) -> None:
    pipe = pipe_of(model)
    attribute, _, name = layer.partition(".")
    weight = getattr(pipe, attribute).get_submodule(name).weight
    torch.manual_seed(0)
    state, change = pair(written, weight.shape[0], tuple(weight.shape[1:]), roles, alpha)
    save(state, path)
    lora = check_merged(pipe, path, {f"{layer}.weight": change})
    assert (lora.num_tensors, lora.num_without_effect, lora.unused) == (len(state), 0, "")
    assert bool(lora.alpha) == (alpha is None)


QKV = ("to_q", "to_k", "to_v")
ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


@pytest.mark.parametrize(
    ("model", "written", "layers", "roles"),
    [
        ("flux", "lora_unet_double_blocks_0_img_attn_qkv", [f"transformer_blocks.0.attn.{x}" for x in QKV], KOHYA),
        ("flux", "diffusion_model.double_blocks.0.txt_attn.qkv",
         [f"transformer_blocks.0.attn.{x}" for x in ADDED], PEFT),
        ("flux", "base_model.model.single_blocks.0.linear1",
         [*(f"single_transformer_blocks.0.attn.{x}" for x in QKV), "single_transformer_blocks.0.proj_mlp"], PEFT),
        ("flux", "double_blocks.0.processor.qkv_lora1", [f"transformer_blocks.0.attn.{x}" for x in QKV], BARE),
        ("flux", "single_blocks.0.processor.qkv_lora", [f"single_transformer_blocks.0.attn.{x}" for x in QKV], BARE),
        ("flux2-dev", "diffusion_model.double_blocks.0.img_attn.qkv",
         [f"transformer_blocks.0.attn.{x}" for x in QKV], PEFT),
        ("flux2-dev", "lora_unet_double_blocks_0_txt_attn_qkv",
         [f"transformer_blocks.0.attn.{x}" for x in ADDED], KOHYA),
        ("z-image-turbo", "lora_unet_layers_0_attention_qkv", [f"layers.0.attention.{x}" for x in QKV], KOHYA),
        ("sd35-medium", "diffusion_model.joint_blocks.0.context_block.attn.qkv",
         [f"transformer_blocks.0.attn.{x}" for x in ADDED], PEFT),
        ("sd35-medium", "lora_unet_joint_blocks_0_x_block_attn2_qkv",
         [f"transformer_blocks.0.attn2.{x}" for x in QKV], KOHYA),
    ],
)  # fmt: skip
def test_one_layer_of_the_file_is_several_of_the_model(
    model: str, written: str, layers: list[str], roles: str, path: Path
) -> None:
    pipe = pipe_of(model)
    shapes = [pipe.transformer.get_submodule(layer).weight.shape for layer in layers]
    torch.manual_seed(0)
    state, change = pair(written, sum(shape[0] for shape in shapes), (shapes[0][1],), roles, ALPHA)
    save(state, path)
    parts = change.split([shape[0] for shape in shapes])
    expected = {f"transformer.{layer}.weight": part for layer, part in zip(layers, parts, strict=True)}
    check_merged(pipe, path, expected)
    hot = read_lora(pipe, path).layers["denoiser"]
    assert all(layer.matrices is not None for layer in hot.values()), "each can be beside its layer"


@pytest.mark.parametrize("model", ["flux", "flux2-dev", "sd35-medium"])
def test_scale_and_shift_of_the_last_norm_are_exchanged(model: str, path: Path) -> None:
    pipe = pipe_of(model)
    weight = pipe.transformer.norm_out.linear.weight
    torch.manual_seed(0)
    state, change = pair(  # type: ignore[call-arg]
        "lora_unet_final_layer_adaLN_modulation_1", *weight.shape[:1], (weight.shape[1],), KOHYA, ALPHA
    )
    save(state, path)
    shift, scale = change.chunk(2)
    check_merged(pipe, path, {"transformer.norm_out.linear.weight": torch.cat([scale, shift])})


def loha(out: int, inner: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    a1, b1, a2, b2 = rand(out, 3), rand(3, inner), rand(out, 3), rand(3, inner)
    state = {"hada_w1_a": a1, "hada_w1_b": b1, "hada_w2_a": a2, "hada_w2_b": b2, "alpha": torch.tensor(ALPHA)}
    return state, ALPHA / 3 * (a1 @ b1) * (a2 @ b2)


def lokr(out: int, inner: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    first, a, b = rand(2, 4), rand(out // 2, 3), rand(3, inner // 4)
    state = {"lokr_w1": first, "lokr_w2_a": a, "lokr_w2_b": b, "alpha": torch.tensor(ALPHA)}
    return state, ALPHA / 3 * torch.kron(first, a @ b)


def whole_lokr(out: int, inner: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    first, second = rand(2, 4), rand(out // 2, inner // 4)
    return {"lokr_w1": first, "lokr_w2": second, "alpha": torch.tensor(7.0)}, torch.kron(first, second)


def difference(out: int, inner: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    change = rand(out, inner)
    return {"diff": change}, change


@pytest.mark.parametrize("form", [loha, lokr, whole_lokr, difference])
@pytest.mark.parametrize(
    "written", ["lora_unet_double_blocks_0_img_attn_proj", "transformer.transformer_blocks.0.attn.to_out.0"]
)
def test_other_sums(form: Callable[[int, int], Any], written: str, path: Path) -> None:
    pipe = build("flux")
    layer = "transformer_blocks.0.attn.to_out.0"
    torch.manual_seed(0)
    state, change = form(*pipe.transformer.get_submodule(layer).weight.shape)
    save({f"{written}.{name}": value for name, value in state.items()}, path)
    check_merged(pipe, path, {f"transformer.{layer}.weight": change})


def test_convolutions_with_a_core(path: Path) -> None:
    pipe = build("sd")
    layer = "down_blocks.0.resnets.0.conv1"
    out, inner, *kernel = pipe.unet.get_submodule(layer).weight.shape
    torch.manual_seed(0)
    down, core, up = rand(RANK, inner, 1, 1), rand(RANK, RANK, *kernel), rand(out, RANK, 1, 1)
    name = f"lora_unet_{layer.replace('.', '_')}"
    save(
        {f"{name}.lora_down.weight": down, f"{name}.lora_mid.weight": core, f"{name}.lora_up.weight": up},
        path,
    )
    image = rand(1, inner, 8, 8)
    conv = torch.nn.functional.conv2d
    expected = conv(conv(conv(image, down), core, padding=1), up)
    weight = torch.zeros(out, inner, *kernel)
    change = read_lora(pipe, path).layers["denoiser"][layer].weight
    assert change is not None
    weight += change.values("cpu").reshape(weight.shape)
    assert torch.allclose(conv(image, weight, padding=1), expected, atol=1e-3)
    first, a, b, t = rand(RANK, out), rand(RANK, inner), rand(RANK, out), rand(RANK, inner)
    cores = rand(RANK, RANK, *kernel), rand(RANK, RANK, *kernel)
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
    save({f"{name}.{key}": v for key, v in zip(names, (first, a, b, t, *cores), strict=True)}, path)
    first_core, other = (
        torch.einsum("ijkl,jr,ip->prkl", c, w_b, w_a)
        for c, w_a, w_b in ((cores[0], first, a), (cores[1], b, t))
    )
    check_merged(pipe, path, {f"unet.{layer}.weight": first_core * other})


def test_biases_and_norms_are_added(path: Path) -> None:
    pipe = build("sd")
    torch.manual_seed(0)
    norm, layer = "down_blocks.1.attentions.0.transformer_blocks.0.norm1", "mid_block.attentions.0.proj_in"
    width, (out, inner) = (
        len(pipe.unet.get_submodule(norm).weight),
        pipe.unet.get_submodule(layer).weight.shape[:2],
    )
    pair_state, change = pair(f"unet.{layer}", out, (inner,), PEFT)
    state = pair_state | {
        f"unet.{layer}.lora_B.bias": rand(out),
        f"lora_unet_{norm.replace('.', '_')}.w_norm": rand(width),
        f"lora_unet_{norm.replace('.', '_')}.b_norm": rand(width),
        "lora_unet_conv_out.diff_b": rand(len(pipe.unet.conv_out.bias)),
    }
    save(state, path)
    check_merged(
        pipe,
        path,
        {
            f"unet.{layer}.weight": change,
            f"unet.{layer}.bias": state[f"unet.{layer}.lora_B.bias"],
            f"unet.{norm}.weight": state[f"lora_unet_{norm.replace('.', '_')}.w_norm"],
            f"unet.{norm}.bias": state[f"lora_unet_{norm.replace('.', '_')}.b_norm"],
            "unet.conv_out.bias": state["lora_unet_conv_out.diff_b"],
        },
    )


def test_a_file_that_mixes_block_names_is_read_whole(path: Path) -> None:
    pipe = build("sdxl")
    width = pipe.unet.get_submodule(Q).in_features
    torch.manual_seed(0)
    query, first = pair(
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", width, (width,), KOHYA, ALPHA
    )
    other, second = pair(
        f"lora_unet_{Q.replace('to_q', 'to_k').replace('.', '_')}", width, (width,), KOHYA, ALPHA
    )
    save(query | other, path)
    check_merged(pipe, path, {f"unet.{Q}.weight": first, f"unet.{Q.replace('to_q', 'to_k')}.weight": second})
    both = query | {
        key.replace("input_blocks_4_1", "down_blocks_1_attentions_0"): value for key, value in query.items()
    }
    save(both, path)
    assert not read_lora(build("sdxl"), path).problems, "the same layer under two names, with the same values"
    save(both | {key: value * 2 for key, value in query.items() if "up" in key}, path)
    with pytest.raises(
        UnusableModel,
        match=r"names .*attn1.to_q twice with different values, as .* and as",
    ):
        merge(build("sdxl"), path)
