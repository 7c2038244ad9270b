"""Offloaded components, with the CPU as the device: onloading copies, so addresses tell what is onloaded."""

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, draw, drawn, modules, psnr, session, upcasting
from vivace.errors import Unsupported
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.machinery.technique import Machine
from vivace.measure.accelerator import weights_bytes
from vivace.techniques import offload

GPU = Machine("cuda", "a GPU", (9, 0), "/usr/bin/c++")
ORDERS = {
    "sd": ["text_encoder", "unet", "vae"],
    "sdxl": ["text_encoder", "text_encoder_2", "unet", "vae"],
    "flux": ["text_encoder", "text_encoder_2", "transformer", "vae"],
}


@pytest.fixture(autouse=True)
def _cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_enable", lambda pipe, *_: ComponentOffloader(pipe, "cpu", pin=False))
    monkeypatch.setattr("vivace.runtime.opening.this_machine", lambda device: GPU)


def addresses(module: Any) -> list[int]:
    """Of everything that holds data."""
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_component_is_onloaded_at_a_time(family: str) -> None:
    pipe = build(family)
    offloaded = vivace.apply(pipe, "offload(model)")
    parts = modules(pipe)
    on_host = {name: addresses(part) for name, part in parts.items()}
    called: list[str] = []

    def onloaded() -> list[str]:
        return [name for name, part in parts.items() if not set(addresses(part)) & set(on_host[name])]

    def look(name: str) -> Any:
        def at_work(*_: Any) -> None:
            assert name in onloaded()
            later = ORDERS[family][ORDERS[family].index(name) :]
            assert set(onloaded()) <= set(later), "those before it are offloaded"
            called.append(name)

        return at_work

    for name, part in parts.items():
        inner = part.decoder if name == "vae" else part
        layer = next(layer for layer in inner.modules() if isinstance(layer, torch.nn.Linear))
        layer.register_forward_pre_hook(look(name))
    for _ in range(2):
        draw(offloaded)
        assert onloaded() == []
        assert {name: addresses(part) for name, part in parts.items()} == on_host, "nothing was copied back"
    assert [name for k, name in enumerate(called) if name not in called[:k]] == ORDERS[family]


@pytest.mark.parametrize("place", ["unet", "vae", "callback"])
def test_a_call_that_fails_leaves_all_components_offloaded(place: str) -> None:
    pipe = upcasting()
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    offloaded = vivace.apply(pipe, "offload(model)")
    on_host = {name: addresses(part) for name, part in modules(pipe).items()}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    call: dict[str, Any] = {"callback_on_step_end": fail} if place == "callback" else {}
    part = {"unet": pipe.unet, "vae": pipe.vae.decoder, "callback": None}[place]
    hook = part.register_forward_pre_hook(fail) if part is not None else None
    with pytest.raises(RuntimeError, match="no room"):
        draw(offloaded, **call)
    assert {name: addresses(part) for name, part in modules(pipe).items()} == on_host
    assert pipe.vae.dtype == torch.float16
    if hook is not None:
        hook.remove()
    assert np.array_equal(draw(offloaded), reference)


@pytest.mark.parametrize("recipe", ["", "inference_mode+", "int8@denoiser,vae+"])
def test_a_vae_component_that_is_cast_in_the_call(recipe: str) -> None:
    pipe = upcasting()
    reference = draw(vivace.apply(copy.deepcopy(pipe), recipe.rstrip("+") or "baseline"))
    offloaded = vivace.apply(pipe, f"{recipe}offload(model)")
    on_host = addresses(pipe.vae)
    dtypes: list[torch.dtype] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda module, _: dtypes.append(module.conv_in.weight.dtype))
    whole = weights_bytes(pipe)
    for _ in range(2):
        assert np.array_equal(draw(offloaded), reference)
        assert (pipe.vae.dtype, addresses(pipe.vae)) == (torch.float16, on_host)
        assert offloaded.evidence()["weights_copied_per_call_bytes"] == whole, "the VAE in half precision"
    assert dtypes == [torch.float32] * 2


def test_changes_to_an_offloaded_component_persist() -> None:
    pipe, same = build("sd"), build("sd")
    offloaded, reference = vivace.apply(pipe, "offload(model)"), vivace.apply(same, "baseline")
    draw(offloaded)
    for each in (pipe, same):
        with torch.no_grad():
            each.unet.conv_in.weight.mul_(1.05)  # as a LoRA is fused
            layer = each.unet.conv_out
            layer.weight.data = layer.weight.data * 0.9
            each.unet.time_embedding.linear_1 = torch.nn.Sequential(each.unet.time_embedding.linear_1)
        each.to(torch.bfloat16)
    for _ in range(2):
        assert np.array_equal(draw(offloaded), draw(reference))
        assert pipe.unet.dtype == torch.bfloat16


def test_tied_weights_stay_tied() -> None:
    pipe = build("flux")
    t5 = pipe.text_encoder_2
    assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr()
    offloaded = vivace.apply(pipe, "offload(model)")
    before = t5.shared.weight.data_ptr()

    def look(*_: Any) -> None:
        assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr() != before

    t5.encoder.register_forward_pre_hook(look)
    draw(offloaded)
    assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr() == before


@pytest.mark.parametrize(
    "recipe", ["int8", "bf16+int8_dynamic", "fp8_weight", "nf4", "int8@denoiser,text_encoder,vae"]
)
@pytest.mark.slow("fp8_weight", "bf16*")
@pytest.mark.quick("nf4", "int8")
def test_quantised_weights_are_rebuilt(recipe: str) -> None:
    reference = drawn("sd", recipe)
    offloaded = session("sd", f"{recipe}+offload(model)")
    layers = {
        n: m
        for n, m in offloaded.pipe.unet.named_modules()
        if hasattr(getattr(m, "weight", None), "__tensor_flatten__")
    }
    on_host = {name: layer.weight for name, layer in layers.items()}
    assert on_host
    for _ in range(2):
        assert np.array_equal(draw(offloaded), reference)
        assert all(layer.weight is on_host[name] for name, layer in layers.items())


@pytest.mark.parametrize(
    "recipe",
    [
        "quantize(int8, backend=bitsandbytes)",
        "quantize(nf4, backend=bitsandbytes)",
        "quantize(q4_0, backend=gguf)",
    ],
)
def test_other_libraries_weights_are_onloaded(recipe: str) -> None:
    package = recipe.rpartition("=")[2].rstrip(")")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    reference = drawn("sd", recipe)
    offloaded = session("sd", f"{recipe}+offload(model)")
    on_host = addresses(offloaded.pipe.unet)
    for _ in range(2):
        assert psnr(draw(offloaded), reference) > 60
        assert addresses(offloaded.pipe.unet) == on_host


def test_a_pipeline_without_an_order_is_refused() -> None:
    pipe = build("sd")
    pipe.model_cpu_offload_seq = None
    with pytest.raises(
        Unsupported, match="does not say in which order its components work; group can do without"
    ):
        vivace.apply(pipe, "offload(model)")


def test_hooks_of_components_can_be_removed() -> None:
    pipe = build("sd")
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    offloaded = vivace.apply(pipe, "offload(model)")
    draw(offloaded)
    pipe.text_encoder._hf_hook.pre_forward(pipe.text_encoder)
    pipe.remove_all_hooks()
    assert not any("_apply" in vars(part) or hasattr(part, "_hf_hook") for part in modules(pipe).values())
    assert np.array_equal(draw(offloaded), reference)
    pipe.maybe_free_model_hooks()
    again = vivace.apply(pipe, "offload(model)")
    assert np.array_equal(draw(again), reference)


def test_a_component_called_alone_is_offloaded_too() -> None:
    offloaded = session("sd", "offload(model)")
    on_host = addresses(offloaded.pipe.text_encoder)
    with offloaded.surroundings():
        offloaded.pipe.encode_prompt("a star", "cpu", 1, False)
        assert addresses(offloaded.pipe.text_encoder) != on_host
    assert addresses(offloaded.pipe.text_encoder) == on_host
