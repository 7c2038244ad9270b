"""Offloaded layers, with the CPU as the device: onloading copies, so addresses tell what is onloaded."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vivace
from tests.families import FAMILIES, STEPS, build, draw, drawn, modules, session, upcasting
from vivace.errors import RecipeError
from vivace.machinery.offloading import offloaded_module
from vivace.machinery.offloading.layer_offloader import (
    LayerOffloader,
    _Batch,
)
from vivace.machinery.offloading.offloaded_module import OffloadedModule
from vivace.machinery.technique import Machine
from vivace.techniques import offload

pytestmark = pytest.mark.usefixtures("small_images")

GPU = Machine("cuda", "a GPU", (9, 0), "/usr/bin/c++")
CPU = torch.device("cpu")
RECIPES = ("offload(group)", "offload(group, stream=True)")
KEEPING = "offload(group, stream=True, keep=0.005)"


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[LayerOffloader]:
    """With the CPU as the GPU: the offloader of each pipeline."""
    made: list[LayerOffloader] = []

    def enable(pipe: Any, technique: Any, device: Any) -> Any:
        made.append(
            LayerOffloader(pipe, CPU, pin=False, prefetch=technique.stream, keep=technique.keep * 1e9)
        )
        return made[-1]

    monkeypatch.setattr(offload, "_enable", enable)
    monkeypatch.setattr("vivace.runtime.opening.this_machine", lambda device: GPU)
    return made


def addresses(pipe: Any) -> list[int]:
    """Of everything that holds data."""
    return [t.data_ptr() for part in modules(pipe).values() for t in (*part.parameters(), *part.buffers())]


def linears(module: Any) -> list[Any]:
    return [layer for layer in module.modules() if isinstance(layer, torch.nn.Linear)]


def onloaded(on_host: dict[Any, int]) -> list[Any]:
    """Linear layers that are not where they were."""
    return [layer for layer, place in on_host.items() if layer.weight.data_ptr() != place]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("sd", "flux")
def test_one_layer_is_onloaded_at_a_time(family: str) -> None:
    pipe = build(family)
    offloaded = vivace.apply(pipe, "offload(group)")
    before = addresses(pipe)
    on_host = {layer: layer.weight.data_ptr() for part in modules(pipe).values() for layer in linears(part)}
    on_device_at: list[Any] = []
    denoiser = pipe.transformer if family == "flux" else pipe.unet
    for layer in linears(denoiser):
        # PyTorch calls it before the forward, which onloads the layer.
        layer.register_forward_pre_hook(lambda module, _: on_device_at.append(onloaded(on_host)))
        wrapped = layer.forward

        def look(*arguments: Any, layer: Any = layer, wrapped: Any = wrapped) -> Any:
            output = wrapped(*arguments)
            assert onloaded(on_host) == [], "it is offloaded"
            return output

        layer.forward = look
    for _ in range(2):
        draw(offloaded)
    assert not any(on_device_at)
    assert len(on_device_at) > 50
    assert addresses(pipe) == before, "nothing was copied back"


@pytest.mark.parametrize("recipe", RECIPES)
def test_biases_and_norms_stay_for_the_call(recipe: str) -> None:
    pipe = build("sd")
    offloaded = vivace.apply(pipe, recipe)
    norm, layer = pipe.unet.conv_norm_out, pipe.unet.time_embedding.linear_1
    small = (norm.weight, norm.bias, layer.bias)
    on_host = [tensor.data_ptr() for tensor in small]
    places_of: list[list[int]] = []
    norm.register_forward_pre_hook(lambda *_: places_of.append([tensor.data_ptr() for tensor in small]))
    draw(offloaded)
    (places_in_call,) = {tuple(places) for places in places_of}
    assert len(places_of) > 2
    assert not set(places_in_call) & set(on_host)
    assert [tensor.data_ptr() for tensor in small] == on_host
    norm(torch.zeros(1, norm.num_channels, 4, 4))
    assert places_of[-1] == on_host, "asked before its forward"
    assert norm.weight.data_ptr() not in on_host, "called by itself"
    pipe.maybe_free_model_hooks()
    assert [tensor.data_ptr() for tensor in small] == on_host


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("place", ["layer", "vae", "callback"])
@pytest.mark.diagonal
@pytest.mark.quick("vae-*")
def test_a_call_that_fails_leaves_all_layers_offloaded(place: str, recipe: str) -> None:
    pipe = upcasting()
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    offloaded = vivace.apply(pipe, recipe)
    on_host = addresses(pipe)
    draw(offloaded)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    call: dict[str, Any] = {"callback_on_step_end": fail} if place == "callback" else {}
    part = {"layer": pipe.unet.mid_block, "vae": pipe.vae.decoder, "callback": None}[place]
    hook = part.register_forward_pre_hook(fail) if part is not None else None
    with pytest.raises(RuntimeError, match="no room"):
        draw(offloaded, **call)
    assert addresses(pipe) == on_host
    assert pipe.vae.dtype == torch.float16
    if hook is not None:
        hook.remove()
    assert np.array_equal(draw(offloaded), reference)
    assert addresses(pipe) == on_host


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.quick("*stream=True)")
def test_layers_of_a_vae_that_is_cast_in_the_call(recipe: str) -> None:
    reference = draw(vivace.apply(upcasting(), "baseline"))
    pipe = upcasting()
    offloaded = vivace.apply(pipe, recipe)
    on_host = addresses(pipe)
    for _ in range(3):
        assert np.array_equal(draw(offloaded), reference)
        assert (pipe.vae.dtype, addresses(pipe)) == (torch.float16, on_host)


def whole(module: Any) -> int:
    """Its bytes in host memory."""
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.diagonal
@pytest.mark.quick("flux*")
def test_some_layers_stay_while_the_denoiser_works(
    family: str, stream: bool, made: list[LayerOffloader]
) -> None:
    pipe = build(family)
    denoiser = pipe.transformer if family == "flux" else pipe.unet
    keep = whole(denoiser) / 2
    plain = session(family, f"offload(group, stream={stream})")
    reference = draw(plain)
    offloaded = vivace.apply(pipe, f"offload(group, stream={stream}, keep={keep / 1e9})")
    on_host = {id(layer): layer.weight.data_ptr() for layer in linears(denoiser)}
    before, in_decoder, in_steps = addresses(pipe), [], []

    def on_device() -> list[Any]:
        return [layer for layer in linears(denoiser) if layer.weight.data_ptr() != on_host[id(layer)]]

    def at_end_of_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if not stream:
            in_steps.append([layer.weight.data_ptr() for layer in on_device()])
        return tensors

    pipe.vae.decoder.register_forward_pre_hook(lambda *_: in_decoder.append(len(on_device())))
    for _ in range(2):
        assert np.array_equal(draw(offloaded, callback_on_step_end=at_end_of_step), reference)
        assert addresses(pipe) == before
    assert in_decoder == [0, 0], "they are offloaded for the VAE"
    (effect,) = offloaded.effects.values()
    assert 0.8 * keep < effect["kept_bytes"] <= keep
    if not stream:
        assert len(in_steps[0]) > 10
        assert in_steps[0] == in_steps[1], "the same copies"
    saved = int(plain.evidence()["weights_copied_per_call_bytes"]) - int(
        offloaded.evidence()["weights_copied_per_call_bytes"]
    )
    assert saved > (STEPS[family] - 1) * 0.8 * keep if not stream else saved > 0


def test_keeping_belongs_to_group() -> None:
    with pytest.raises(RecipeError, match="keep belongs to group, not to model"):
        vivace.apply(build("sd"), "offload(model, keep=2)")


class _Watch(TorchDispatchMode):
    """Which operations read an offloaded tensor, as on a GPU they must not."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        tensors = [t for part in modules(pipe).values() for t in (*part.parameters(), *part.buffers())]
        self.on_host = {address for tensor in tensors for address in addresses_in(tensor)}
        self.is_swapping = False
        self.met: set[str] = set()
        self.num_tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.is_swapping:
            inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.num_tensors += len(inputs)
            if any(address in self.on_host for tensor in inputs for address in addresses_in(tensor)):
                self.met.add(str(func))
        return func(*args, **(kwargs or {}))


def addresses_in(tensor: Any) -> list[int]:
    """Of its storage, or of those of the tensors in a quantised one."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [address for name in names for address in addresses_in(getattr(tensor, name))]
    return [tensor.untyped_storage().data_ptr()] if tensor.numel() else []


EVERYWHERE = {
    "sd": [
        "inference_mode",
        "int8",
        "layerwise_casting",
        "deepcache(hits=0.5)",
        "cfg_cutoff(0.5)",
    ],
    "sdxl": ["fuse_qkv+channels_last"],
    "flux": ["fuse_qkv", "int8@denoiser,text_encoder_2", "fbcache(hits=0.5)", "taylorseer(hits=0.5)"],
}


@pytest.mark.parametrize("how", [*RECIPES, KEEPING])
@pytest.mark.parametrize(("family", "recipe"), [(f, r) for f, recipes in EVERYWHERE.items() for r in recipes])
@pytest.mark.diagonal
@pytest.mark.quick("sd-int8-*", "flux-int8@*", "sdxl-fuse_qkv+*", "flux-fbcache*", "sd-cfg_cutoff*")
@pytest.mark.slow("flux-int8@*", "sdxl-fuse_qkv+*")
def test_nothing_computes_with_offloaded_tensors(
    family: str, recipe: str, how: str, made: list[LayerOffloader], monkeypatch: pytest.MonkeyPatch
) -> None:
    offloaded = session(family, f"{recipe}+{how}")
    watch = _Watch(offloaded.pipe)
    for owner, name in (
        (OffloadedModule, "onload"),
        (OffloadedModule, "allocate"),
        (OffloadedModule, "restore"),
        (OffloadedModule, "offload_added"),
        (_Batch, "copy"),
    ):
        whole = getattr(owner, name)

        def swapping(*arguments: Any, whole: Any = whole) -> Any:
            before, watch.is_swapping = watch.is_swapping, True
            try:
                return whole(*arguments)
            finally:
                watch.is_swapping = before

        monkeypatch.setattr(owner, name, swapping)
    small = {"height": 64, "width": 64, "num_inference_steps": 2}
    with watch:
        draw(offloaded, **small)
        draw(offloaded, **small)
    assert watch.met == set()
    assert watch.num_tensors > 1000

    monkeypatch.setattr(LayerOffloader, "onload_layer", lambda self, part: None)
    with watch:
        draw(offloaded, **{**small, "num_inference_steps": 2})
    assert len(watch.met) > 3, "layers that are not onloaded compute with offloaded tensors"


def test_layers_prefetched_for_another_step_are_dropped_for_the_vae() -> None:
    pipe = build("sd")
    offloaded = vivace.apply(pipe, "offload(group, stream=True)")
    layers = linears(pipe.unet)
    on_host = [layer.weight.data_ptr() for layer in layers]
    draw(offloaded)
    after_steps, in_decoder = [], []

    def num_onloaded() -> int:
        return sum(layer.weight.data_ptr() != place for layer, place in zip(layers, on_host, strict=True))

    def at_end_of_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        after_steps.append(num_onloaded())
        return tensors

    pipe.vae.decoder.register_forward_pre_hook(lambda *_: in_decoder.append(num_onloaded()))
    draw(offloaded, callback_on_step_end=at_end_of_step)
    assert after_steps[-1] > 10, "the first layers of the next step, if there were one"
    assert in_decoder == [0]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.quick("*stream=True)")
def test_an_adapter_added_between_calls_is_onloaded_too(recipe: str) -> None:
    pipe, same = build("sd"), build("sd")
    offloaded, reference = vivace.apply(pipe, recipe), vivace.apply(same, "baseline")
    draw(offloaded)
    for each in (pipe, same):
        torch.manual_seed(0)
        for layer in linears(each.unet)[4:9]:
            parent, _, name = next(n for n, m in each.unet.named_modules() if m is layer).rpartition(".")
            more = torch.nn.Linear(layer.in_features, layer.out_features)
            each.unet.get_submodule(parent).register_module(name, _Both(layer, more))
    added = [layer for layer in linears(pipe.unet) if "forward" not in vars(layer)]
    assert len(added) == 5
    for _ in range(2):
        assert np.array_equal(draw(offloaded), draw(reference))
    assert [layer for layer in linears(pipe.unet) if "forward" not in vars(layer)] == []


class _Both(torch.nn.Module):
    """As an adapter wraps a layer."""

    def __init__(self, base: Any, more: Any) -> None:
        super().__init__()
        self.base_layer, self.more = base, more

    def forward(self, inputs: Any) -> Any:
        return self.base_layer(inputs) + 0.01 * self.more(inputs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.quick("*stream=True)")
def test_hooks_of_layers_can_be_removed(recipe: str) -> None:
    pipe = build("sd")
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    offloaded = vivace.apply(pipe, recipe)
    draw(offloaded)
    pipe.remove_all_hooks()
    assert not any("forward" in vars(layer) for part in modules(pipe).values() for layer in linears(part))
    assert np.array_equal(draw(offloaded), reference)
    again = vivace.apply(pipe, recipe)
    assert np.array_equal(draw(again), reference)


def test_layers_are_onloaded_one_by_one_behind_a_wrapped_denoiser(made: list[LayerOffloader]) -> None:
    """cfg_cutoff's wrapper takes the attribute in which PyTorch puts a compiled call."""
    offloaded = session("flux", "guidance(3.5, true_cfg=2)+cfg_cutoff(0.5)+offload(group)")
    transformer = offloaded.pipe.transformer
    assert transformer._compiled_call_impl is not None
    called: list[Any] = []
    (offloader,) = made
    onload = offloader.onload_layer
    offloader.onload_layer = lambda part: (called.append(part.module), onload(part))[1]
    draw(offloaded)
    assert transformer not in called
    assert transformer.x_embedder in called


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_compiled_blocks_with_quantised_weights_are_onloaded(scheme: str) -> None:
    """What `vivace plan` proposes for cards that are too small for a quantised denoiser."""
    counters, quantised = torch._dynamo.utils.counters, f"dtype(bf16)+quantize({scheme})"
    torch._dynamo.reset()
    counters.clear()
    reference = draw(session("flux", f"{quantised}+compile(backend=eager, blocks=repeated)"))
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    offloaded = session(
        "flux", f"{quantised}+compile(backend=eager, blocks=repeated)+offload(group, keep=0.005)"
    )
    for _ in range(2):
        assert np.array_equal(draw(offloaded), reference)
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("recipe", RECIPES)
def test_pinned_bytes_of_layers_are_recorded(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        offloaded_module, "_allocate_pinned", lambda size: torch.empty(size, dtype=torch.uint8)
    )
    monkeypatch.setattr(
        offload,
        "_enable",
        lambda pipe, technique, _: LayerOffloader(pipe, CPU, pin=True, prefetch=technique.stream),
    )
    reference = drawn("flux")
    offloaded = session("flux", recipe)
    (effect,) = offloaded.effects.values()
    whole = sum(
        {
            t.data_ptr(): t.nbytes for m in modules(offloaded.pipe).values() for t in m.state_dict().values()
        }.values()
    )
    assert int(effect["offloaded_bytes"]) <= int(effect["page_locked_bytes"]) <= 1.01 * whole
    for _ in range(2):
        assert np.array_equal(draw(offloaded), reference)
