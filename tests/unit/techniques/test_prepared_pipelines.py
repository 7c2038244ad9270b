"""Pipelines that a user prepared before the recipe: offloaded, adapted, quantised, cast. Right, or refused by name."""

import functools
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as _attend

import vivace
from tests.contract.test_technique_contract import ALL, RECIPES
from tests.families import build, draw, drawn
from vivace.errors import NoEffect, Unsupported

CALL: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32}
FIRST = {name: next(recipe for technique, recipe in RECIPES if technique == name) for name in ALL}
CALLS_ALONE = (
    "cfg_cutoff", "gpu_postprocess", "guidance", "inference_mode", "scheduler", "steps", "tf32", "trim_text",
    "dual_block_cache", "faster_cache", "first_block_cache", "magcache", "pyramid_attention", "seacache", "taylorseer",
    "teacache",
)  # fmt: skip
"""Techniques that touch no weight; of the caches `deepcache` stands for all."""
OFFLOADED = {"denoiser": ("unet",), "everything": ("text_encoder", "unet", "vae")}


def offloaded(parts: tuple[str, ...]) -> Any:
    """Return tiny-sd with these parts on the meta device, as `enable_sequential_cpu_offload` leaves them on a GPU."""
    pipe = build("sd")
    for part in parts:
        module = getattr(pipe, part)
        accelerate.cpu_offload(module, torch.device("cpu"), offload_buffers=bool(module._parameters))
    return pipe


def applied(pipe: Any, recipe: str) -> Any:
    return vivace.apply(pipe, recipe, prompts=["a red circle"])


@pytest.mark.parametrize("parts", OFFLOADED)
@pytest.mark.parametrize("name", sorted(set(ALL) - {"compile", "parallel"}))
@pytest.mark.diagonal
@pytest.mark.slow(*(f"{name}-*" for name in CALLS_ALONE))
def test_weights_that_are_not_there_are_not_written(name: str, parts: str) -> None:
    recipe = FIRST[name]
    pipe = offloaded(OFFLOADED[parts])
    try:
        session = applied(pipe, recipe)
    except (Unsupported, NoEffect) as error:
        if "offload" not in str(error):
            with pytest.raises(type(error)):
                applied(build("sd"), recipe)
        elif name not in ("fused", "lora"):  # which have rules of their own
            assert "pipe.remove_all_hooks()" in str(error)
        assert np.array_equal(draw(vivace.apply(pipe), **CALL), drawn("sd", **CALL))
        return
    np.testing.assert_allclose(draw(session, **CALL), draw(applied(build("sd"), recipe), **CALL), atol=1e-3)


def test_what_the_refusal_says_helps() -> None:
    pipe = offloaded(("unet",))
    with pytest.raises(Unsupported, match=r"fuse_qkv: the denoiser is without its weights.*remove_all_hooks"):
        vivace.apply(pipe, "fuse_qkv")
    pipe.remove_all_hooks()
    session = vivace.apply(pipe, "fuse_qkv")
    np.testing.assert_allclose(draw(session, **CALL), draw(vivace.apply(build("sd")), **CALL), atol=1e-4)


def test_new_weights_would_be_in_no_group_of_diffusers_offloading() -> None:
    pipe = build("sd")
    cpu = torch.device("cpu")
    pipe.unet.enable_group_offload(cpu, cpu, "leaf_level")
    for recipe in ("quantize(int8)", "bf16", "fuse_qkv"):
        with pytest.raises(Unsupported, match=r"offloaded in groups.*apply the recipe before"):
            vivace.apply(pipe, recipe)
    vivace.apply(pipe, "deepcache")


class Adapted(torch.nn.Module):
    """A layer as PEFT wraps it."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = torch.nn.ModuleDict({"style": torch.nn.Linear(layer.in_features, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"style": torch.nn.Linear(4, layer.out_features, bias=False)})

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["style"](self.lora_A["style"](x))


def adapted() -> Any:
    pipe = build("sd")
    torch.manual_seed(0)
    for name, layer in list(pipe.unet.named_modules()):
        if name.endswith(("to_q", "to_k", "to_v")):
            parent, _, last = name.rpartition(".")
            setattr(pipe.unet.get_submodule(parent), last, Adapted(layer).requires_grad_(False))
    return pipe


@pytest.mark.parametrize("recipe", ["fuse_qkv", "fused", "fuse_qkv@denoiser", "bf16+fuse_qkv"])
def test_attached_adapters_are_not_dropped(recipe: str) -> None:
    with pytest.raises(Unsupported, match=r"under adapters.*fuse_lora"):
        vivace.apply(adapted(), recipe)
    vivace.apply(adapted(), "fuse_qkv@vae")


def test_what_goes_with_attached_adapters_keeps_them() -> None:
    expected = draw(vivace.apply(adapted()), **CALL)
    assert np.abs(expected - draw(vivace.apply(build("sd")), **CALL)).max() > 0.05
    for recipe in ("quantize(int8)",):
        changed = np.abs(draw(vivace.apply(adapted(), recipe), **CALL) - expected).max()
        plain = np.abs(draw(vivace.apply(build("sd"), recipe), **CALL) - expected).max()
        assert changed < plain, recipe


def _by_torchao(pipe: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(pipe.unet, Int8WeightOnlyConfig())


def _by_torch(pipe: Any) -> None:
    pipe.unet = torch.ao.quantization.quantize_dynamic(pipe.unet, {torch.nn.Linear}, dtype=torch.qint8)


def _cast_by_diffusers(pipe: Any) -> None:
    pipe.unet.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def _cast_by_vivace(pipe: Any) -> None:
    vivace.apply(pipe, "layerwise_casting")


def _half(pipe: Any) -> None:
    pipe.unet.half()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", ["bf16", "bf16@denoiser", "channels_last", "fuse_qkv", "steps(3)+fp16"])
@pytest.mark.parametrize("prepare", [_by_torchao, _by_torch, _cast_by_diffusers, _cast_by_vivace, _half])
@pytest.mark.quick("*-bf16", "*-fuse_qkv", "_by_torchao-channels_last", "_half-steps*")
def test_what_another_library_stored_is_right_or_refused(prepare: Any, recipe: str) -> None:
    pipe = build("sd")
    prepare(pipe)
    runs = prepare is not _half  # diffusers cannot run it either
    before = draw(vivace.apply(pipe), **CALL) if runs else None
    try:
        session = vivace.apply(pipe, recipe)
    except Unsupported as error:
        assert "load it again" not in str(error)
        assert "dtype: the denoiser" in str(error) or "fuse_qkv: the denoiser" in str(error)
        assert runs
        assert np.array_equal(draw(vivace.apply(pipe), **CALL), before)
        return
    assert recipe == "channels_last" or not runs
    if runs:
        np.testing.assert_allclose(draw(session, **CALL), before, atol=0.3)
    elif "16" in recipe:
        assert np.isfinite(draw(session, **CALL)).all()


def test_a_lora_is_not_rounded_to_eight_bits(tmp_path: Any) -> None:
    from tests.lora_files import write_lora

    pipe = build("sd")
    path = write_lora(pipe, tmp_path / "lora.safetensors", 2)
    _cast_by_diffusers(pipe)
    with pytest.raises(Unsupported, match="stored in 8 bits"):
        vivace.apply(pipe, f"lora('{path}')")


class ByHand:
    """Attention of a user's own, without PyTorch's function."""

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, **_: Any) -> Any:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            attn.head_to_batch_dim(x)
            for x in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        scores = torch.softmax(query @ key.transpose(1, 2) * attn.scale, dim=-1)
        return attn.to_out[0](attn.batch_to_head_dim(scores @ value))


class Around:
    """A user's own, around diffusers'."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Aliased:
    def __call__(self, attn: Any, hidden_states: Any, **_: Any) -> Any:
        return _attend(hidden_states, hidden_states, hidden_states)


@pytest.mark.parametrize("backend", ["math", "flash"])
def test_attention_has_no_effect_on_a_processor_that_computes_by_hand(backend: str) -> None:
    pipe = build("sd")
    pipe.unet.set_attn_processor(ByHand())
    with pytest.raises(Unsupported, match="ByHand, which asks no kernel"):
        vivace.apply(pipe, f"attention({backend})")


def test_processors_around_pytorch_s_attention_are_seen_through() -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0, SlicedAttnProcessor

    for processor in (Around(AttnProcessor2_0()), functools.partial(Around(AttnProcessor2_0())), Aliased()):
        pipe = build("sd")
        pipe.unet.set_attn_processor(processor)
        vivace.apply(pipe, "attention(math)")
    for processor in (Around(ByHand()), SlicedAttnProcessor(1)):
        pipe = build("sd")
        pipe.unet.set_attn_processor(processor)
        with pytest.raises(Unsupported, match="asks no kernel"):
            vivace.apply(pipe, "attention(math)")


def test_a_trace_without_attention_refutes_it() -> None:
    pipe = build("sd")
    session = vivace.apply(pipe, "attention(math)")
    assert (
        session.refuted({"attention_kernels": ["denoiser: aten::_scaled_dot_product_attention_math"]}) is None
    )
    refuted = session.refuted({"attention_kernels": []})
    assert refuted is not None
    assert "asked for no kernel" in refuted
