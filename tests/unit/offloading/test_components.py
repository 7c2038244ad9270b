"""Parts that wait and visit, with the CPU as the device: a visit is a copy, so addresses tell who is where."""

import copy
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, draw, modules, psnr, session, upcasting
from vivace.contract.technique import Machine, Target
from vivace.errors import Unsupported
from vivace.measure.memory import weights_bytes
from vivace.offloading import pinned_memory as page_locked
from vivace.offloading.components import Part, Visits
from vivace.offloading.pinned_memory import PageLocked
from vivace.offloading.tensor_swap import unknown_kind
from vivace.quantization.packed_int4 import pack
from vivace.techniques import offload
from vivace.techniques.offload import Offload

GPU = Machine("cuda", "a GPU", (9, 0), "/usr/bin/c++")
ORDERS = {
    "sd": ["text_encoder", "unet", "vae"],
    "sdxl": ["text_encoder", "text_encoder_2", "unet", "vae"],
    "flux": ["text_encoder", "text_encoder_2", "transformer", "vae"],
}


@pytest.fixture(autouse=True)
def _cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_enable", lambda pipe, *_: Visits(pipe, "cpu", locks=False))
    monkeypatch.setattr("vivace.runtime.session.this_machine", lambda device: GPU)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def addresses(module: Any) -> list[int]:
    """Of everything that holds data."""
    return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("family", FAMILIES)
def test_who_is_where(family: str) -> None:
    pipe = build(family)
    moved = vivace.apply(pipe, "offload(model)")
    parts = modules(pipe)
    waiting = {name: addresses(part) for name, part in parts.items()}
    came: list[str] = []

    def here() -> list[str]:
        return [name for name, part in parts.items() if not set(addresses(part)) & set(waiting[name])]

    def look(name: str) -> Any:
        def at_work(*_: Any) -> None:
            assert name in here()
            later = ORDERS[family][ORDERS[family].index(name) :]
            assert set(here()) <= set(later), "those before it have left"
            came.append(name)

        return at_work

    for name, part in parts.items():
        inner = part.decoder if name == "vae" else part
        layer = next(layer for layer in inner.modules() if isinstance(layer, torch.nn.Linear))
        layer.register_forward_pre_hook(look(name))
    for _ in range(2):
        draw(moved)
        assert here() == []
        assert {name: addresses(part) for name, part in parts.items()} == waiting, "nothing was copied back"
    assert [name for k, name in enumerate(came) if name not in came[:k]] == ORDERS[family]


def test_a_part_that_is_not_called_lets_those_before_it_leave() -> None:
    """What is in the order and has nothing to do in this call."""
    pipe = build("sdxl")
    visits = Visits(pipe, "cpu", locks=False)
    pipe.text_encoder._hf_hook.pre_forward(pipe.text_encoder)
    assert visits._parts["text_encoder"].is_here
    pipe.unet._hf_hook.pre_forward(pipe.unet)
    assert [name for name, part in visits._parts.items() if part.is_here] == ["unet"]
    pipe.maybe_free_model_hooks()
    assert not visits.is_under_way


def test_pipelines_know_the_device() -> None:
    pipe = build("sd")
    Visits(pipe, "meta", locks=False)
    assert pipe._execution_device == torch.device("meta")
    assert pipe.device == torch.device("cpu"), "between calls"


@pytest.mark.parametrize("place", ["unet", "vae", "callback"])
def test_a_call_that_fails_leaves_nothing_behind(place: str) -> None:
    pipe = upcasting()
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    moved = vivace.apply(pipe, "offload(model)")
    waiting = {name: addresses(part) for name, part in modules(pipe).items()}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no room")

    call: dict[str, Any] = {"callback_on_step_end": fail} if place == "callback" else {}
    part = {"unet": pipe.unet, "vae": pipe.vae.decoder, "callback": None}[place]
    hook = part.register_forward_pre_hook(fail) if part is not None else None
    with pytest.raises(RuntimeError, match="no room"):
        draw(moved, **call)
    assert {name: addresses(part) for name, part in modules(pipe).items()} == waiting
    assert pipe.vae.dtype == torch.float16
    if hook is not None:
        hook.remove()
    assert np.array_equal(draw(moved), reference)


def test_a_visit_that_finds_no_room_did_not_happen(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 5)), torch.device("cpu"))
    waiting = addresses(part.module)
    make = torch.empty_like

    def little_room(like: torch.Tensor, **how: Any) -> torch.Tensor:
        if len(like) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(like, **how)

    monkeypatch.setattr(torch, "empty_like", little_room)
    with pytest.raises(torch.OutOfMemoryError):
        part.come()
    assert addresses(part.module) == waiting
    assert not part.is_here


@pytest.mark.parametrize("recipe", ["", "inference_mode+", "int8@denoiser,vae+"])
def test_a_vae_that_is_cast_in_the_call(recipe: str) -> None:
    pipe = upcasting()
    reference = draw(vivace.apply(copy.deepcopy(pipe), recipe.rstrip("+") or "baseline"))
    moved = vivace.apply(pipe, f"{recipe}offload(model)")
    waiting = addresses(pipe.vae)
    dtypes: list[torch.dtype] = []
    pipe.vae.decoder.register_forward_pre_hook(lambda module, _: dtypes.append(module.conv_in.weight.dtype))
    whole = weights_bytes(pipe)
    for _ in range(2):
        assert np.array_equal(draw(moved), reference)
        assert (pipe.vae.dtype, addresses(pipe.vae)) == (torch.float16, waiting)
        assert moved.evidence()["weights_copied_per_call_bytes"] == whole, "the VAE in half precision"
    assert dtypes == [torch.float32] * 2


def test_encoders_that_are_called_by_turns() -> None:
    """SDXL's are called for the prompt, then for the negative one: the second stays while the first comes again."""
    pipe = build("sdxl")
    moved = vivace.apply(pipe, "offload(model)")
    draw(moved, negative_prompt="a star")
    size = {name: sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for name, m in modules(pipe).items()}
    copied = moved.evidence()["weights_copied_per_call_bytes"]
    assert copied == sum(size.values()) + size["text_encoder"]


def test_what_is_done_while_a_part_waits_is_there_at_the_next_visit() -> None:
    pipe, same = build("sd"), build("sd")
    moved, reference = vivace.apply(pipe, "offload(model)"), vivace.apply(same, "baseline")
    draw(moved)
    for each in (pipe, same):
        with torch.no_grad():
            each.unet.conv_in.weight.mul_(1.05)  # as a LoRA is fused
            layer = each.unet.conv_out
            layer.weight.data = layer.weight.data * 0.9
            each.unet.time_embedding.linear_1 = torch.nn.Sequential(each.unet.time_embedding.linear_1)
        each.to(torch.bfloat16)
    for _ in range(2):
        assert np.array_equal(draw(moved), draw(reference))
        assert pipe.unet.dtype == torch.bfloat16


def test_buffers_that_were_exchanged_come_back() -> None:
    """`Module.to` replaces them, where it only exchanges a parameter's data."""
    module = torch.nn.BatchNorm1d(4)
    part = Part(module, torch.device("cpu"))
    module.running_mean.fill_(1 / 3)
    mean, weight = module.running_mean, module.weight
    part.come()
    assert module.weight is weight
    module.to(torch.float64)
    part.leave()
    assert module.running_mean is mean
    assert module.weight is weight
    assert {t.dtype for t in module.state_dict().values()} == {torch.float32, torch.int64}
    part.leave()
    assert module.running_mean is mean


def test_tied_weights_stay_tied() -> None:
    pipe = build("flux")
    t5 = pipe.text_encoder_2
    assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr()
    moved = vivace.apply(pipe, "offload(model)")
    before = t5.shared.weight.data_ptr()

    def look(*_: Any) -> None:
        assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr() != before

    t5.encoder.register_forward_pre_hook(look)
    draw(moved)
    assert t5.shared.weight.data_ptr() == t5.encoder.embed_tokens.weight.data_ptr() == before


def test_views_of_one_storage_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked, "_lock", lambda size: torch.empty(size, dtype=torch.uint8))
    first, second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    second.weight = torch.nn.Parameter(first.weight.data)  # other objects, the same data
    part = Part(torch.nn.Sequential(first, second), torch.device("cpu"))
    values = first.weight.detach().clone()
    memory = PageLocked(1024)
    part.settle(memory)
    assert memory.num_bytes == 256
    assert first.weight.data_ptr() == second.weight.data_ptr()
    assert part.come() == 256
    assert first.weight.data_ptr() == second.weight.data_ptr()
    part.leave()
    assert torch.equal(first.weight, values)
    assert torch.equal(second.weight, values)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("recipe", ["", "int8+", "layerwise_casting@text_encoder+"])
@pytest.mark.long
def test_compiled_code_goes_on_being_used(recipe: str) -> None:
    reference = draw(session("sd", f"{recipe}compile(backend=eager)"))
    torch._dynamo.reset()
    moved = session("sd", f"{recipe}compile(backend=eager)+offload(model)")
    for _ in range(3):
        assert np.array_equal(draw(moved), reference)
        assert moved.evidence()["compiled_graphs"] == 1
        assert moved.evidence()["graph_breaks"] == 0


@pytest.mark.parametrize(
    "recipe", ["int8", "bf16+int8_dynamic", "fp8_weight", "nf4", "int8@denoiser,text_encoder,vae"]
)
def test_quantised_weights_are_put_together_again(recipe: str) -> None:
    reference = draw(session("sd", recipe))
    moved = session("sd", f"{recipe}+offload(model)")
    layers = {
        n: m
        for n, m in moved.pipe.unet.named_modules()
        if hasattr(getattr(m, "weight", None), "__tensor_flatten__")
    }
    waiting = {name: layer.weight for name, layer in layers.items()}
    assert waiting
    for _ in range(2):
        assert np.array_equal(draw(moved), reference)
        assert all(layer.weight is waiting[name] for name, layer in layers.items())


def test_packed_int4_visits() -> None:
    layer = torch.nn.Linear(64, 8, bias=False)
    layer.weight = torch.nn.Parameter(pack(layer.weight), requires_grad=False)
    part = Part(torch.nn.Sequential(layer), torch.device("cpu"))
    part.settle(None)
    waiting, inputs = layer.weight, torch.randn(3, 64)
    wanted = layer(inputs)
    assert part.come() == sum(getattr(waiting, name).nbytes for name in ("packed", "scale", "zero"))
    assert type(layer.weight) is type(waiting)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert layer.weight.packed.data_ptr() != waiting.packed.data_ptr()
    assert torch.equal(layer(inputs), wanted)
    part.leave()
    assert layer.weight is waiting


class _State:
    """As bitsandbytes keeps scales: in objects that hang on weights and layers."""

    __module__ = "bitsandbytes.functional"

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class _Weight(torch.nn.Parameter):
    pass


def test_scales_that_hang_on_a_weight_come_along() -> None:
    class Layer(torch.nn.Module):
        __module__ = "bitsandbytes.nn"

        def __init__(self) -> None:
            super().__init__()
            inner = _State(absmax=torch.ones(2), code=torch.arange(3.0))
            self.weight = _Weight(torch.zeros(4), requires_grad=False)
            self.weight.quant_state = _State(absmax=torch.ones(5), blocksize=64, state2=inner)
            self.weight.SCB, self.weight.module = self.weight.data, self
            self.quant_state, self.state = self.weight.quant_state, _State(CB=None, SCB=None)

    layer = Layer()
    part = Part(torch.nn.Sequential(layer), torch.device("cpu"))
    part.settle(None)
    weight, outer = layer.weight, layer.quant_state
    before = (weight.data_ptr(), outer.absmax, outer.state2.absmax, outer.state2.code, weight.SCB)
    assert part.come() == 4 * (4 + 5 + 2 + 3), "what is the weight itself, is copied with it"
    assert weight.SCB.data_ptr() == weight.data_ptr() != before[0]
    assert layer.quant_state is weight.quant_state is outer
    assert outer.absmax is not before[1]
    assert outer.state2.code is not before[3]
    layer.state.SCB, weight.SCB = weight.SCB, None  # as its first call does
    part.leave()
    assert layer.state.SCB is None, "no copy is held"
    assert weight.data_ptr() == before[0]
    after = (outer.absmax, outer.state2.absmax, outer.state2.code, weight.SCB)
    assert all(now is then for now, then in zip(after, before[1:], strict=True))


@pytest.mark.parametrize(
    "recipe",
    [
        "quantize(int8, backend=bitsandbytes)",
        "quantize(nf4, backend=bitsandbytes)",
        "quantize(q4_0, backend=gguf)",
    ],
)
def test_other_libraries_weights_visit(recipe: str) -> None:
    package = recipe.rpartition("=")[2].rstrip(")")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    reference = draw(session("sd", recipe))
    moved = session("sd", f"{recipe}+offload(model)")
    waiting = addresses(moved.pipe.unet)
    for _ in range(2):
        assert psnr(draw(moved), reference) > 60
        assert addresses(moved.pipe.unet) == waiting


def test_a_weight_that_hides_its_tensors_is_refused() -> None:
    class Hiding(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return NotImplemented

    pipe = build("sd")
    assert unknown_kind(pipe.unet) is None
    hiding = torch.Tensor._make_wrapper_subclass(Hiding, (4, 4))
    pipe.unet.conv_in._buffers["hiding"] = hiding
    target = Target(GPU, pipe=pipe)
    for mode in ("model", "group"):
        assert "denoiser's weights are Hiding" in (Offload(mode=mode).unsupported(target) or "")


def test_a_pipeline_without_an_order_is_refused() -> None:
    pipe = build("sd")
    pipe.model_cpu_offload_seq = None
    with pytest.raises(Unsupported, match="does not say in which order its parts work; group can do without"):
        vivace.apply(pipe, "offload(model)")


def test_hooks_can_be_taken_off() -> None:
    pipe = build("sd")
    reference = draw(vivace.apply(copy.deepcopy(pipe), "baseline"))
    moved = vivace.apply(pipe, "offload(model)")
    draw(moved)
    pipe.text_encoder._hf_hook.pre_forward(pipe.text_encoder)
    pipe.remove_all_hooks()
    assert not any("_apply" in vars(part) or hasattr(part, "_hf_hook") for part in modules(pipe).values())
    assert np.array_equal(draw(moved), reference)
    pipe.maybe_free_model_hooks()
    again = vivace.apply(pipe, "offload(model)")
    assert np.array_equal(draw(again), reference)


def test_parts_that_are_called_alone_leave_too() -> None:
    moved = session("sd", "offload(model)")
    waiting = addresses(moved.pipe.text_encoder)
    with moved.surroundings():
        moved.pipe.encode_prompt("a star", "cpu", 1, False)
        assert addresses(moved.pipe.text_encoder) != waiting
    assert addresses(moved.pipe.text_encoder) == waiting


def test_what_the_host_locked_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def lock(size: int) -> Any:
        locked.append(size)
        if len(locked) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return torch.empty(size, dtype=torch.uint8)

    monkeypatch.setattr(page_locked, "_lock", lock)
    monkeypatch.setattr(offload, "_enable", lambda pipe, *_: Visits(pipe, "cpu", locks=True))
    reference = draw(session("sd"))
    moved = session("sd", "offload(model)")
    (effect,) = moved.effects.values()
    assert 0 < int(effect["page_locked_bytes"]) <= locked[0]
    assert effect["rest_not_page_locked"] == "CUDA error: out of memory"
    assert np.array_equal(draw(moved), reference)

    monkeypatch.setattr(page_locked, "_lock", lambda size: torch.empty(size, dtype=torch.uint8))
    (effect,) = session("sd", "offload(model)").effects.values()
    assert "rest_not_page_locked" not in effect
    assert int(effect["page_locked_bytes"]) >= int(effect["offloaded_bytes"]), "and the buffers"


def test_originals_are_given_up_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host never holds a part twice."""
    import weakref

    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False) for _ in range(5)])
    originals = [weakref.ref(layer.weight.untyped_storage()) for layer in layers]
    alive: list[int] = []
    memory = PageLocked(2**20)
    monkeypatch.setattr(page_locked, "_lock", lambda size: torch.empty(size, dtype=torch.uint8))
    take = memory.take

    def watched(tensor: Any) -> Any:
        alive.append(sum(ref() is not None for ref in originals))
        return take(tensor)

    monkeypatch.setattr(memory, "take", watched)
    Part(layers, torch.device("cpu")).settle(memory)
    assert alive == [5, 4, 3, 2, 1]
