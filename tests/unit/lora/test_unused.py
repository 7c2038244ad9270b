"""What of a LoRA is not used: refused in true words, said, or without effect; and what PEFT's settings change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import vivace
from tests.families import build, load
from tests.flow_models import pipeline
from vivace.errors import Unsupported, UnusableModel
from vivace.machinery.lora.layer_names import LayerNames
from vivace.machinery.lora.lora_files import digest, locate_lora
from vivace.machinery.lora.read_lora import merge, read_lora
from vivace.machinery.technique import component_of
from vivace.models import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.export import write_script

RANK = 4
MID = "mid_block.attentions.0.proj_in"
OF_FLUX = ("lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0")
NAME = f"lora_unet_{MID.replace('.', '_')}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ink.safetensors"


def plain(
    pipe: Any, name: str = NAME, layer: str = MID, roles: tuple[str, str] = ("lora_down", "lora_up")
) -> dict[str, torch.Tensor]:
    """Two random matrices of one layer of the denoiser."""
    weight = (pipe.unet if hasattr(pipe, "unet") else pipe.transformer).get_submodule(layer).weight
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(RANK, *weight.shape[1:], generator=generator)
    up = torch.randn(weight.shape[0], RANK, *[1] * (weight.dim() - 2), generator=generator)
    return {f"{name}.{roles[0]}.weight": down, f"{name}.{roles[1]}.weight": up}


def save(state: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    save_file({key: value.clone().contiguous() for key, value in state.items()}, path, metadata)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["dora_scale"], r"is DoRA, which rescales the weights after adding \(3 of 3 tensors: "),
        (["a1.weight", "a2.weight", "b1.weight", "b2.weight"], r"is GLoRA, whose change depends on .* \(4 of 6"),
        (["oft_blocks"], "is OFT, which rotates the weights"),
        (["boft_R"], "is OFT, which rotates the weights"),
        (["ia3_l"], "is IA3, which scales the weights"),
        (["weight", "on_input"], "is IA3, which scales the weights"),
        (["set_weight"], "is values that replace those of the model"),
        (["modules_to_save.default.weight"], "is values that replace those of the model"),
        (["bias"], "is values that replace those of the model"),
        (["reshape_weight"], "is a LoRA that makes a weight larger"),
        (["lora_embedding_A"], "is a LoRA of a token embedding"),
        (["lora_E"], "is AdaLoRA"),
        (["vera_lambda_b"], "is VeRA"),
        (["lora_A.bias"], "is a LoRA with a bias between its matrices"),
        (["something_new"], "is of no kind that vivace knows"),
    ],
)  # fmt: skip
def test_each_kind_that_is_no_sum_is_called_by_its_name(keys: list[str], says: str, path: Path) -> None:
    pipe = build("sd")
    other = "lora_unet_conv_out" if keys != ["dora_scale"] else NAME
    save(plain(pipe) | {f"{other}.{key}": torch.ones(4, 4) for key in keys}, path)
    with pytest.raises(UnusableModel, match=says) as error:
        merge(pipe, path)
    assert "copy or download" not in str(error.value)


def test_a_kind_in_the_text_encoder_alone_can_be_left_out(path: Path) -> None:
    pipe = build("sd")
    save(plain(pipe) | {"lora_te_text_model_encoder_layers_0_mlp_fc1.dora_scale": torch.ones(1, 4)}, path)
    text = f"lora('{path.as_posix()}')"
    with pytest.raises(Unsupported, match=r"is DoRA.*or leave the text_encoder out with @denoiser"):
        vivace.apply(pipe, text)
    assert vivace.apply(pipe, f"{text}@denoiser").effects["lora(ink)@denoiser"]["denoiser.merged_layers"] == 1


@pytest.mark.parametrize("hot", ["", ", hot=True"])
def test_parts_for_what_the_pipeline_lacks_are_counted_and_named(hot: str, path: Path) -> None:
    pipe = build("sd")
    more = {
        f"lora_te2_text_model_encoder_layers_{k}_self_attn_q_proj.lora_{role}.weight": torch.ones(8, 8)
        for k in range(3)
        for role in ("down", "up")
    }
    save(plain(pipe) | more | {"bundle_emb.ink.string_to_param.*": torch.ones(2, 8)}, path)
    session = vivace.apply(pipe, f"lora('{path.as_posix()}'{hot})")
    (warning,) = session.warnings
    assert warning.startswith("lora: ink: 7 of 9 tensors are not used: bundle_emb.ink")
    assert "text_encoder_2, which this pipeline does not have" in warning
    assert "embeddings of trigger words, which vivace does not load" in warning
    assert session.effects["lora(ink)"]["unused"] in warning
    assert session.effects["lora(ink)"]["tensors"] == 9
    with pytest.raises(UnusableModel, match="7 of 9 tensors are not used"):
        merge(build("sd"), path)  # a model's own LoRA is used whole


def test_an_exchanged_file_says_what_of_it_is_unused(path: Path) -> None:
    pipe = build("sd")
    save(plain(pipe), path)
    session = vivace.apply(pipe, f"lora('{path.as_posix()}', hot=True)")
    other = path.with_name("other.safetensors")
    save(
        plain(pipe)
        | {"lora_te2_x.lora_down.weight": torch.ones(4, 4), "lora_te2_x.lora_up.weight": torch.ones(4, 4)},
        other,
    )
    session.set_lora(other.as_posix())
    assert "2 of 4 tensors are not used" in session.warnings[-1]
    assert "2 of 4 tensors are not used" in session.evidence()["lora.other.notes"]
    save(plain(pipe) | {f"{NAME}.dora_scale": torch.ones(4)}, other)
    with pytest.raises(Unsupported, match="is DoRA"):
        session.set_lora(other.as_posix())


def test_zeros_may_go_and_are_counted(path: Path) -> None:
    pipe = build("flux")
    name, layer = "lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0"
    zeros = {
        "lora_te1_text_model_embeddings_position_embedding.lora_down.weight": torch.ones(2, 3),
        "lora_te1_text_model_embeddings_position_embedding.lora_up.weight": torch.zeros(3, 2),
        "lora_unet_nowhere.diff_b": torch.zeros(3),
        "lora_unet_nowhere.alpha": torch.tensor(1.0),
    }
    save(plain(pipe, name, layer) | zeros, path)
    session = vivace.apply(pipe, f"lora('{path.as_posix()}')")
    assert session.effects["lora(ink)"]["tensors_that_add_zero"] == 4
    assert not session.warnings
    save(plain(pipe, name, layer) | zeros | {"lora_unet_nowhere.diff_b": torch.ones(3)}, path)
    with pytest.raises(
        Unsupported, match=r"which has no layer lora_unet_nowhere \(2 of 6 tensors\); give the LoRA of this"
    ):
        vivace.apply(build("flux"), f"lora('{path.as_posix()}')")


def test_the_model_that_it_was_made_for_is_named(path: Path) -> None:
    sd, sdxl = build("sd"), build("sdxl")
    text = "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"
    wide = {
        f"unet.{text}.lora_A.weight": torch.ones(4, 2048),
        f"unet.{text}.lora_B.weight": torch.ones(640, 4),
    }
    save(wide, path)
    with pytest.raises(UnusableModel, match="its layers are those of SDXL, and this is Stable Diffusion"):
        merge(sd, path)
    save(plain(sd) | wide, path, {"ss_base_model_version": "sdxl_base_v1-0"})
    with pytest.raises(UnusableModel, match="its header says sdxl_base_v1-0, and this is Stable Diffusion"):
        merge(sd, path)
    save({"lora_unet_double_blocks_0_img_attn_proj.lora_down.weight": torch.ones(4, 8)}, path)
    with pytest.raises(UnusableModel, match="not two matrices"):
        merge(sdxl, path)
    save(
        plain(build("flux"), "lora_unet_double_blocks_0_img_attn_proj", "transformer_blocks.0.attn.to_out.0"),
        path,
    )
    with pytest.raises(
        UnusableModel, match=r"its layers are those of FLUX\.1 or FLUX\.2, and this is Stable Diffusion"
    ):
        merge(sdxl, path)
    wider = {"transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_A.weight": torch.ones(4, 512)}
    wider |= {
        "transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj.lora_B.weight": torch.ones(4608, 4)
    }
    save(wider, path)  # of the larger model of one family
    with pytest.raises(UnusableModel, match="matrices are 4x512 and 4608x4; give the LoRA of this model"):
        merge(pipeline("flux2-klein-4b"), path)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("sd", "down_blocks.0.attentions.0.proj_in"), ("flux", "transformer_blocks.0.attn.to_q")],
)
def test_a_prefix_is_read_if_it_is_known_and_named_if_it_is_not(kind: str, layer: str, path: Path) -> None:
    pipe = build(kind)
    save(plain(pipe, f"pipe.dit.{layer}", layer), path)
    assert merge(pipe, path) == 1
    for prefix in ("my.model.", "wrapped_"):
        save(plain(pipe, f"{prefix}{layer}", layer), path)
        with pytest.raises(
            UnusableModel, match=f"a prefix that vivace does not know .*'{prefix}'.*rename"
        ) as caught:
            merge(pipe, path)
        assert "its layers are those of" not in str(caught.value)
        assert "give the LoRA of this model" not in str(caught.value)


def test_modulations_of_flux2_are_not_those_of_flux1(path: Path) -> None:
    layers = ("single_stream_modulation.lin", "double_stream_modulation_img.lin")
    tensors = {f"x.{name}.lora_{side}.weight": torch.ones(4, 4) for name in layers for side in "AB"}
    save(tensors, path)
    with pytest.raises(UnusableModel) as caught:
        merge(build("flux"), path)
    assert "its layers are those of FLUX.2, and this is FLUX.1" in str(caught.value)


def test_a_second_lora_beside_one_that_peft_attached_is_merged(path: Path) -> None:
    pipe = build("sd")
    block, layer = pipe.unet.down_blocks[0].resnets[0], "down_blocks.0.resnets.0.conv1"
    save(plain(pipe, f"unet.{layer}", layer), path)
    own = block.conv1

    class Wrapped(
        torch.nn.Module
    ):  # as PEFT's Conv2d, which has its layer's sizes without those of its kernel
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = own
            self.in_features, self.out_features = own.in_channels, own.out_channels

        weight = property(lambda self: self.base_layer.weight)
        bias = property(lambda self: self.base_layer.bias)

    block.conv1 = Wrapped()
    before = own.weight.clone()
    assert merge(pipe, path) == 1
    assert not torch.equal(own.weight, before)


def test_names_of_openclip_are_not_known(path: Path) -> None:
    pipe = build("sdxl")
    layer = "lora_te2_transformer_resblocks_0_mlp_c_fc"
    save(
        plain(pipe)
        | {f"{layer}.lora_down.weight": torch.ones(4, 8), f"{layer}.lora_up.weight": torch.ones(8, 4)},
        path,
    )
    with pytest.raises(
        UnusableModel,
        match=f"this text_encoder_2, which has no layer {layer}.*or leave the text_encoder_2 out",
    ):
        merge(pipe, path)


def test_guidance_of_a_sibling_is_said_to_be_unused(path: Path) -> None:
    pipe = load("tiny-flux-schnell")
    start = plain(pipe, *OF_FLUX)
    guidance = {
        f"lora_unet_guidance_in_in_layer.lora_{role}.weight": torch.ones(4, 4) for role in ("down", "up")
    }
    save(start | guidance, path)
    (warning,) = vivace.apply(pipe, f"lora('{path.as_posix()}')").warnings
    assert "2 of 4 tensors are not used" in warning
    assert "guidance, which this model does not take as an input" in warning


def test_a_bias_that_a_layer_lacks_and_two_adapters_are_refused(path: Path) -> None:
    pipe = build("sd")
    layer = "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q"
    save(plain(pipe) | {f"unet.{layer}.diff_b": torch.ones(8)}, path)
    with pytest.raises(UnusableModel, match=r"changes the bias of .*attn1.to_q, which has none"):
        merge(pipe, path)
    save(
        {
            f"unet.{MID}.lora_{role}.{name}.weight": torch.ones(4, 4)
            for role in "AB"
            for name in ("one", "two")
        },
        path,
    )
    with pytest.raises(UnusableModel, match="has two adapters for"):
        merge(pipe, path)
    (path.parent / "model.safetensors").write_bytes(b"")
    save({"down.weight": torch.ones(4), "proj.weight": torch.ones(4)}, path)
    with pytest.raises(UnusableModel, match="has no LoRA layers"):
        merge(pipe, path)


def test_what_is_no_pair_of_matrices_cannot_be_hot(path: Path) -> None:
    pipe = build("sd")
    save(plain(pipe) | {"lora_unet_conv_out.diff_b": torch.ones(len(pipe.unet.conv_out.bias))}, path)
    with pytest.raises(
        Unsupported, match=r"changes 1 of 2 layers by more or other than two matrices \(conv_out\).*merge it"
    ):
        vivace.apply(pipe, f"lora('{path.as_posix()}', hot=True)")
    assert (
        vivace.apply(pipe, f"lora('{path.as_posix()}')").effects["lora(ink)"]["denoiser.merged_layers"] == 2
    )


def adapter(pipe: Any, folder: Path, **settings: Any) -> Path:
    """An adapter as PEFT saves it: alpha is in the json alone."""
    folder.mkdir(exist_ok=True)
    save(
        plain(pipe, f"base_model.model.{MID}", roles=("lora_A", "lora_B")),
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 0.5,
        "target_modules": ["proj_in"],
        "fan_in_fan_out": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "scale"),
    [
        ({}, 1 / 8),
        ({"use_rslora": True}, 1 / 4),
        ({"alpha_pattern": {"attentions.0.proj_in": 2}}, 1 / 2),
        ({"alpha_pattern": {"proj_out": 2}}, 1 / 8),
        ({"r": 16, "rank_pattern": {"proj_in": RANK}}, 1 / 8),
    ],
)
def test_pefts_alpha_is_read_from_the_json_beside(
    settings: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    pipe = build("sd")
    folder = adapter(pipe, tmp_path / "ink", **settings)
    state = load_file(folder / "adapter_model.safetensors")
    down, up = (state[f"base_model.model.{MID}.lora_{role}.weight"].flatten(1) for role in "AB")
    before = pipe.unet.get_submodule(MID).weight.clone()
    for text in (folder, folder / "adapter_model.safetensors"):
        pipe = build("sd")
        session = vivace.apply(pipe, f"lora('{text.as_posix()}')")
        change = (pipe.unet.get_submodule(MID).weight - before).flatten(1)
        assert torch.allclose(change, scale * up @ down, atol=1e-5)
        assert not session.warnings
    renamed = folder / "adapter_model.safetensors"
    save({key.replace("base_model.model.", "unet."): value for key, value in state.items()}, renamed)
    layer = read_lora(pipe, renamed).layers["denoiser"][MID].matrices
    assert layer is not None
    assert layer.scale == pytest.approx(scale), "renamed keys do not change what alpha is"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"r": 32}, f"does not go with adapter_config.json, which says rank 32 for .*which has rank {RANK}"),
        ({"peft_type": "OFT"}, "adapter_config.json says that it is OFT"),
        ({"init_lora_weights": "pissa_niter_16"}, "takes a part out of the model's weights"),
        ({"init_lora_weights": "olora"}, "takes a part out of the model's weights"),
        ({"init_lora_weights": "corda"}, "takes a part out of the model's weights"),
        ({"init_lora_weights": "loftq"}, "takes a part out of the model's weights"),
        ({"use_dora": True}, "it is DoRA"),
        ({"lora_alpha": "much"}, "does not go with adapter_config.json"),
        ({"layer_replication": [[0, 4]]}, "repeated layers"),
    ],
)
def test_settings_that_do_not_belong_or_cannot_be_followed(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    pipe = build("sd")
    with pytest.raises(UnusableModel, match=says):
        merge(pipe, locate_lora(str(adapter(pipe, tmp_path / "ink", **settings))))


def test_without_the_json_the_assumed_alpha_is_said(tmp_path: Path) -> None:
    pipe = build("sd")
    folder = adapter(pipe, tmp_path / "ink")
    before = digest(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        (folder / "adapter_config.json").read_text().replace("0.5", "1.5")
    )
    assert digest(folder / "adapter_model.safetensors") != before, "another alpha is another recipe"
    (folder / "adapter_config.json").unlink()
    session = vivace.apply(pipe, f"lora('{folder.as_posix()}')")
    assert session.warnings == ["lora: ink: alpha is assumed to be the rank: there is none in the file"]
    (tmp_path / "parts" / "unet").mkdir(parents=True)
    (folder / "adapter_model.safetensors").rename(tmp_path / "parts" / "unet" / "adapter_model.safetensors")
    with pytest.raises(UnusableModel, match="its folders unet do: give them, each as a LoRA"):
        locate_lora(str(tmp_path / "parts"))


def test_a_script_loads_it_through_diffusers_only_where_that_adds_the_same(tmp_path: Path) -> None:
    pipe = build("sd")
    path = tmp_path / "ink.safetensors"
    save(plain(pipe) | {f"{NAME}.alpha": torch.tensor(2.0)}, path)
    assert "pipe.load_lora_weights" in script_of(f"lora('{path.as_posix()}')")
    clip = "lora_te_text_model_encoder_layers_1_self_attn_q_proj"  # without out_proj, diffusers mistakes the name
    width = pipe.text_encoder.config.hidden_size
    more = {f"{clip}.lora_down.weight": torch.ones(2, width), f"{clip}.lora_up.weight": torch.ones(width, 2)}
    for state in (plain(pipe) | more, plain(pipe) | {"lora_unet_conv_out.diff_b": torch.ones(4)}):
        save(state, path)
        text = script_of(f"lora('{path.as_posix()}')")
        assert "pipe.load_lora_weights" not in text
        assert "vivace.apply" in text
    folder = adapter(pipe, tmp_path / "adapter")
    assert "vivace.apply" in script_of(f"lora('{folder.as_posix()}')"), "diffusers does not read the json"


def script_of(recipe: str) -> str:
    return write_script(find_model("tiny-sd"), resolve(recipe), "cpu", prompt="a red circle").text


def test_an_alpha_of_zero_is_said(path: Path) -> None:
    pipe = build("sd")
    save(plain(pipe) | {f"{NAME}.alpha": torch.tensor(0.0)}, path)
    assert vivace.apply(pipe, f"lora('{path.as_posix()}')").warnings == [
        "lora: ink: alpha is 0 for 1 of 1 layers, which adds nothing"
    ]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"lora_down.weight": (4,), "lora_up.weight": (4,)}, "has a tensor of 4 as"),
        ({"lora_down.weight": (), "lora_up.weight": ()}, "has a tensor of one value as"),
        ({"lora_down.weight": (0, 8), "lora_up.weight": (8, 0)}, "has a tensor of (0x8|8x0) as"),
        ({"lora_down.weight": (4, 8)}, "has down, not two matrices"),
        ({"lora_down.weight": (4, 8), "lora_up.weight": (8, 3)}, r"do not go together \(4x8 and 8x3\)"),
        ({"lora_down.weight": (4, 8), "lora_up.weight": (8, 4), "alpha": (3,)}, r"not one number \(3\)"),
        ({"lora_down.weight": (4, 8), "lora_up.weight": (8, 4), "lora_mid.weight": (2, 2)}, "do not go together"),
        ({"lora_down.weight": (4, 8), "lora_up.weight": (8, 4), "diff": (8, 8)}, "diff, down, up, not two matrices"),
        ({"lokr_w1": (4,), "lokr_w2": (4,)}, "has a tensor of 4 as lokr_w"),
        ({"hada_w1_a": (8, 2), "hada_w1_b": (3, 8), "hada_w2_a": (8, 2), "hada_w2_b": (2, 8)}, "do not go together"),
        ({"diff": (0, 3)}, "has a tensor of 0x3 as diff"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_make_a_change_are_malformed(
    tensors: dict[str, tuple[int, ...]], says: str, path: Path
) -> None:
    save({f"{NAME}.{name}": torch.ones(shape) for name, shape in tensors.items()}, path)
    with pytest.raises(
        UnusableModel, match=f"is not a LoRA that vivace reads: .*{says}.*; save or convert it again"
    ):
        merge(build("sd"), path)


def test_matrices_in_eight_bits_are_values_too(path: Path) -> None:
    pipe = build("sd")
    state = plain(pipe)
    save({key: value.to(torch.float8_e4m3fn) for key, value in state.items()}, path)
    before = pipe.unet.get_submodule(MID).weight.clone()
    assert merge(pipe, path) == 1
    down, up = (value.to(torch.float8_e4m3fn).float().flatten(1) for value in state.values())
    assert torch.allclose((pipe.unet.get_submodule(MID).weight - before).flatten(1), up @ down, atol=1e-4)


def test_z_images_redundant_matrices_are_used_once(path: Path) -> None:
    pipe = pipeline("z-image-turbo")
    width = pipe.transformer.layers[0].attention.to_q.in_features
    torch.manual_seed(0)
    down, ups = torch.randn(RANK, width), torch.randn(3, width, RANK)
    start = "lora_unet_layers_0_attention_"
    state = {f"{start}qkv.lora.down.weight": down, f"{start}qkv.lora.up.weight": ups.flatten(0, 1)}
    for k, name in enumerate(("to_q", "to_k", "to_v")):
        state |= {f"{start}{name}.lora.down.weight": down, f"{start}{name}.lora.up.weight": ups[k]}
    save(state, path)
    before = pipe.transformer.layers[0].attention.to_k.weight.clone()
    assert merge(pipe, path) == 3
    assert torch.allclose(pipe.transformer.layers[0].attention.to_k.weight, before + ups[1] @ down, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ("tiny-flux", "lora_unet_double_blocks_0_img_attn.norm.query_norm.diff"),
        ("tiny-flux", "transformer.single_transformer_blocks.0.attn.norm_k.w_norm"),
        ("tiny-sd", "text_encoder.text_model.embeddings.position_embedding.diff"),
        ("tiny-sd", "unet.down_blocks.0.resnets.0.norm1.diff"),
    ],
)
def test_a_difference_of_a_layer_without_bias_is_added(model: str, key: str, path: Path) -> None:
    pipe = load(model)
    (named,) = LayerNames(pipe).find(key.rpartition(".")[0])
    assert named.component is not None
    weight = component_of(pipe, named.component).get_submodule(named.places[0].layer).weight
    before = weight.detach().clone()
    save({key: torch.full(weight.shape, 0.25)}, path)
    assert merge(pipe, path) == 1
    torch.testing.assert_close(weight, before + 0.25)
    bias = key.rpartition(".")[0] + ".diff_b"
    if "norm1" not in key:
        save({bias: torch.ones(len(weight))}, path)
        with pytest.raises(UnusableModel, match=r"bias of .*, which has none"):
            merge(pipe, path)
