"""A denoiser shared by two processes draws what one draws; whatever ends one of them ends the others, in words."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from diffusers import FluxTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.utils._python_dispatch import TorchDispatchMode

import vivace
from tests import families
from tests.families import psnr
from tests.targets import target_of
from vivace.benchmark import Timing
from vivace.contract import Machine
from vivace.errors import Unsupported, WorkerError
from vivace.export.script import write_script
from vivace.models import find_model, load_pipeline
from vivace.multi_gpu.flux_tokens import Ulysses
from vivace.multi_gpu.sharded_denoiser import _agree
from vivace.multi_gpu.sharded_forward import (
    num_bytes,
    pack,
    put_together,
    rows_of,
    shapes_in,
    shares,
    take_apart,
    unpack,
)
from vivace.multi_gpu.split_tokens import _groups_made_anew, needs_diffusers
from vivace.recipes.resolve import resolve
from vivace.spec.record import Outcome
from vivace.techniques import TECHNIQUES, cuda_graph
from vivace.techniques.cuda_graph import Replayed
from vivace.techniques.parallel import Parallel

SAME_DB = 40.0
VERY_SAME_DB = 100.0
RECIPES = {"sd": "parallel(guidance)", "flux": "parallel(ulysses)"}


def pids(session: Any) -> list[int]:
    (effect,) = [effect for label, effect in session._applied if label.startswith("parallel")]
    return [process.pid for process in effect.close.__self__._processes]


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is more than a dead one that nobody has asked after."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def ends(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not lives(pid)


@pytest.fixture(scope="class", params=list(RECIPES))
def both(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Any]]:
    """A family, its pipeline shared by two processes, and the same alone."""
    family = request.param
    with families.session(family, RECIPES[family]) as shared:
        started = pids(shared)
        yield family, shared, families.session(family)
    assert all(not lives(pid) for pid in started), "closing ends them"


class TestBoth:
    @pytest.mark.parametrize(
        "call",
        [
            {},
            {"prompt": ["a red circle", "a blue square above a green star"]},
            {"prompt": ["a red circle", "a blue star", "a green square"]},
            {"height": 160, "width": 96},
            {"prompt": "a big blue diamond right of a small red triangle on a striped white background"},
            {"prompt": "a red circle", "num_images_per_prompt": 2, "guidance_scale": 2.0},
        ],
        ids=["plain", "batch", "odd batch", "size", "prompt", "guidance"],
    )
    def test_it_draws_the_same_picture(self, both: tuple[str, Any, Any], call: dict[str, Any]) -> None:
        _, shared, alone = both
        before = shared.evidence()["forwards_shared"]
        assert psnr(families.draw(shared, **call), families.draw(alone, **call)) > SAME_DB
        evidence = shared.evidence()
        assert evidence["forwards_shared"] > before
        assert evidence["processes"] == 2
        assert evidence["bytes_exchanged_a_forward"] > 0
        assert evidence["peer_1.peak_bytes"] > 1e6
        assert shared.refuted(evidence) is None

    def test_without_guidance_rows_are_not_shared_and_tokens_are(self, both: tuple[str, Any, Any]) -> None:
        family, shared, alone = both
        before = shared.evidence()
        call = {"guidance_scale": 1.0}
        assert psnr(families.draw(shared, **call), families.draw(alone, **call)) > SAME_DB
        after = shared.evidence()
        assert (after["forwards_shared"] == before["forwards_shared"]) is (family == "sd")
        assert (after["forwards_alone"] > before["forwards_alone"]) is (family == "sd")

    def test_one_session_at_a_time(self, both: tuple[str, Any, Any]) -> None:
        family, shared, alone = both
        with pytest.raises(Unsupported, match="close the session"):
            families.session(family, RECIPES[family])
        assert psnr(families.draw(shared), families.draw(alone)) > SAME_DB, "the first goes on"


@pytest.mark.parametrize(
    ("family", "recipe", "least_db"),
    [
        ("sdxl", "parallel(guidance)", SAME_DB),  # conditions in nested dictionaries
        (
            "sd",
            "parallel(guidance)+fuse_qkv+quantize(int8)+deepcache+compile(backend=eager)+inference_mode",
            35,
        ),
        ("sd", "parallel(guidance)+token_merging+taylorseer(hits=0.5)+attention(math)", 35),
        ("flux", "bf16+parallel(guidance)+teacache(hits=0.3)", 35),
        ("flux", "quantize(nf4)+parallel(ulysses)+attention(math)", 35),
        ("flux", "parallel(ring)+attention(math)+steps(4)", SAME_DB),
        ("flux", "parallel(ring)+teacache(hits=0.5)+compile(backend=eager)", SAME_DB),
        ("flux", "parallel(ring)+magcache(hits=0.5)+compile(blocks=repeated, backend=eager)", SAME_DB),
        ("flux", "parallel(ring)+seacache(1)", SAME_DB),
        ("flux", "parallel(ring)+taylorseer(hits=0.3)", SAME_DB),
        ("sd", "int8_dynamic+parallel(guidance)", 35),
    ],
)
def test_the_rest_of_a_recipe_holds_for_each_share(family: str, recipe: str, least_db: float) -> None:
    """Precision and structure travel with the weights; what comes later each process does to its own copy."""
    alone = "+".join(part for part in recipe.split("+") if not part.startswith("parallel")) or "baseline"
    call: dict[str, Any] = {} if family != "flux" else {"prompt": ["a red circle", "a blue star"]}
    expected = families.draw(families.session(family, alone), **call)
    with families.session(family, recipe) as shared:
        assert psnr(families.draw(shared, **call), expected) > least_db
        evidence = shared.evidence()
        assert evidence["forwards_shared"] > 0
        assert shared.refuted(evidence) is None


def even_flux() -> Any:
    """tiny-flux's pipeline with a random transformer of four heads, which two processes share out evenly."""
    pipe = load_pipeline(find_model("tiny-flux"), "cpu")
    torch.manual_seed(0)
    config = dict(pipe.transformer.config) | {
        "num_attention_heads": 4,
        "num_single_layers": 1,
        "num_layers": 1,
    }
    pipe.register_modules(transformer=FluxTransformer2DModel.from_config(config).eval().requires_grad_(False))
    return pipe


def test_even_heads_compile_and_uneven_tokens_are_refused() -> None:
    expected = families.draw(vivace.apply(even_flux()))
    with vivace.apply(even_flux(), "parallel(ulysses)+compile(backend=eager)") as shared:
        assert psnr(families.draw(shared), expected) > SAME_DB
        assert shared.evidence()["graph_breaks"] == 0
        with pytest.raises(Unsupported, match="31 tokens, of which 2 GPUs"):
            families.draw(shared, max_sequence_length=31)
        assert psnr(families.draw(shared), expected) > SAME_DB, "nothing was sent, so it goes on"


@pytest.mark.parametrize(
    ("recipe", "call"),
    [
        ("parallel(ulysses)", {}),
        ("parallel(ulysses, gpus=4)", {"height": 128, "width": 64}),
        ("parallel(ulysses)", {"prompt": ["a red circle", "a blue star", "a green square"]}),
        ("parallel(ulysses)+attention(math)", {}),
        ("fuse_qkv+parallel(ulysses)", {"num_images_per_prompt": 2}),
        ("quantize(int8)+parallel(ulysses)+compile(backend=aot_eager)", {}),
        ("parallel(ulysses)+compile(blocks=repeated, backend=eager)", {"prompt": ["a red circle", "a star"]}),
        ("parallel(ring)", {}),
        ("parallel(ring, gpus=3)", {"height": 96, "width": 96, "max_sequence_length": 24}),
        ("fuse_qkv+parallel(ring)", {"prompt": ["a red circle", "a blue star", "a green square"]}),
        ("quantize(int8)+parallel(ring)+compile(backend=aot_eager)", {}),
        ("parallel(ring)+compile(blocks=repeated, backend=aot_eager)", {"num_images_per_prompt": 2}),
        ("parallel(ulysses, messages=copies)", {"height": 96, "width": 64}),
        ("parallel(ring, gpus=3, messages=copies)", {"height": 96, "width": 96, "max_sequence_length": 24}),
        ("fuse_qkv+parallel(ring, messages=copies)", {"num_images_per_prompt": 2}),
        ("parallel(ulysses, messages=copies)+compile(backend=aot_eager)", {}),
        ("parallel(ring, messages=copies)+compile(blocks=repeated, backend=aot_eager)", {}),
    ],
)
def test_flux_draws_the_very_same_picture(recipe: str, call: dict[str, Any]) -> None:
    alone = "+".join(part for part in recipe.split("+") if part.startswith(("quantize", "fuse")))
    expected = families.draw(vivace.apply(even_flux(), alone or "baseline"), **call)
    with vivace.apply(even_flux(), recipe) as shared:
        assert psnr(families.draw(shared, **call), expected) > VERY_SAME_DB
        evidence = shared.evidence()
        assert evidence["messages_an_attention"] == (1 if "ring" in recipe else 2)
        assert evidence["messages_travel_by"] == ("copies" if "copies" in recipe else "collectives")
        assert evidence.get("graph_breaks", 0) == 0


class Operators(TorchDispatchMode):
    """Counts what runs, and keeps what attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()
        self.attended: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.num[name] += 1
        if "scaled_dot_product" in name:
            self.attended.append(args[:3])
        return func(*args, **(kwargs or {}))


def test_an_attention_takes_two_messages_and_no_copy_behind_the_first() -> None:
    with vivace.apply(even_flux(), "parallel(ulysses)") as shared, Operators() as seen:
        shared("a red circle", height=64, width=64, num_inference_steps=1, output_type="latent")
    assert seen.num["vivace::message"] == 2, "of the double block"
    assert seen.num["vivace::message_beside_linear"] == 2, "of the single one"
    assert seen.num["_c10d_functional::all_gather_into_tensor"] == 1, "the result"
    query, key, value = seen.attended[-1]
    assert len({x.untyped_storage().data_ptr() for x in (query, key, value)}) == 1
    assert query.shape[1] == 2, "half of the heads"
    _, heads, tokens, channels = query.shape
    packed = 3 * heads * channels
    assert query.stride() == (tokens * packed, channels, packed, 1), "as of one product for all three"


def test_a_ring_takes_one_message_that_travels_beside_a_product() -> None:
    with vivace.apply(even_flux(), "parallel(ring)") as shared, Operators() as seen:
        shared("a red circle", height=64, width=64, num_inference_steps=1, output_type="latent")
    assert seen.num["vivace::message_beside_linear"] == 2
    assert seen.num["vivace::message"] == 0
    assert seen.num["_c10d_functional::all_gather_into_tensor"] == 1, "the result"
    query, key, value = seen.attended[-1]
    assert query.shape[2] * 2 == key.shape[2] == value.shape[2], "half of the queries, all keys"
    assert query.shape[1] == key.shape[1] == 4, "of all heads"


def test_copies_of_other_sizes_and_of_another_session() -> None:
    """Buffers are made for each size that is larger than those before, and anew in a later session."""
    expected = {size: families.draw(vivace.apply(even_flux()), height=size) for size in (64, 128, 96)}
    for _ in range(2):
        with vivace.apply(even_flux(), "parallel(ulysses, messages=copies)") as shared:
            for size, picture in expected.items():
                assert psnr(families.draw(shared, height=size), picture) > VERY_SAME_DB


def test_a_process_killed_while_copies_are_fetched_is_told() -> None:
    with vivace.apply(even_flux(), "parallel(ring, messages=copies)") as shared:
        families.draw(shared)
        (pid,) = pids(shared)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(WorkerError, match="SIGKILL"):
            families.draw(shared, num_inference_steps=1000)


def test_a_hit_of_a_step_cache_is_computed_alone_and_of_all_tokens() -> None:
    recipe = "teacache(hits=0.5)"
    expected = families.draw(vivace.apply(even_flux(), recipe), num_inference_steps=8)
    with vivace.apply(even_flux(), f"parallel(ulysses)+{recipe}") as shared:
        for _ in range(2):
            assert psnr(families.draw(shared, num_inference_steps=8), expected) > VERY_SAME_DB
        evidence = shared.evidence()
    hits = round(16 * evidence["cache_hit_rate"])
    assert hits >= 6
    assert evidence["forwards_alone"] == hits
    assert evidence["forwards_shared"] == evidence["peer_1.forwards"] == 16 - hits


def test_layers_that_are_more_than_a_product_are_called() -> None:
    """A hook, as an adapter or a probe hangs it in, runs, though nothing is computed beside the message then."""
    pipe, plain = even_flux(), even_flux()
    expected = families.draw(vivace.apply(plain))
    with vivace.apply(pipe, "parallel(ulysses)") as shared:
        calls: list[Any] = []
        shared.pipe.transformer.single_transformer_blocks[0].proj_out.register_forward_hook(
            lambda *_: calls.append(_)
        )
        assert psnr(families.draw(shared), expected) > VERY_SAME_DB
        assert len(calls) == shared.evidence()["forwards_shared"]


def test_a_kernel_chosen_in_diffusers_own_way_stays_chosen() -> None:
    transformer = even_flux().transformer
    assert not needs_diffusers(transformer, "ulysses", 2)
    assert needs_diffusers(transformer, "ulysses", 3), "four heads"
    assert not needs_diffusers(transformer, "ring", 3)
    try:
        transformer.set_attention_backend("_native_math")  # for all models of this process, and of no other
        assert needs_diffusers(transformer, "ulysses", 2)
        assert needs_diffusers(even_flux().transformer, "ulysses", 2)
        with pytest.raises(Unsupported, match=r"parallel: diffusers' ring .*CUDA kernels alone"):
            vivace.apply(even_flux(), "parallel(ring)")
    finally:
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)


def test_a_mask_is_refused() -> None:
    attention = even_flux().transformer.transformer_blocks[0].attn
    with pytest.raises(ValueError, match="without a mask"):
        Ulysses(2, "0")(attention, torch.zeros(1, 4, 8), attention_mask=torch.ones(1, 4))


_RECORDS_ON_A_CPU = """
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves
from vivace.techniques import cuda_graph

def record(work):
    outputs = work()
    kept = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]

    def replay():
        fresh = [leaf for leaf in tree_leaves(work()) if isinstance(leaf, torch.Tensor)]
        for old, new in zip(kept, fresh):
            old.copy_(new)

    return replay, outputs

cuda_graph.CudaGraph.unsupported = lambda self, target: None
cuda_graph._cuda_recorder = lambda: record
"""


def test_all_record_and_replay_at_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder that runs on a CPU, here and in the other process, which executes this when it starts."""
    (tmp_path / "sitecustomize.py").write_text(_RECORDS_ON_A_CPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(cuda_graph, "_cuda_recorder", cuda_graph._cuda_recorder)
    monkeypatch.setattr(cuda_graph.CudaGraph, "unsupported", cuda_graph.CudaGraph.unsupported)
    exec(_RECORDS_ON_A_CPU, {})  # noqa: S102
    larger = {"height": 128, "width": 64}
    alone = vivace.apply(even_flux())
    expected, expected_larger = families.draw(alone), families.draw(alone, **larger)
    with vivace.apply(even_flux(), "parallel(ulysses)+cuda_graph(max_graphs=1)") as shared:
        graphs = getattr(shared.pipe.transformer, cuda_graph.RECORDED).graphs
        assert psnr(families.draw(shared), expected) > VERY_SAME_DB
        assert psnr(families.draw(shared, **larger), expected_larger) > VERY_SAME_DB, "another graph"
        graphs.clear()  # this process alone
        assert psnr(families.draw(shared, **larger), expected_larger) > VERY_SAME_DB, "both record anew"
        assert psnr(families.draw(shared), expected) > VERY_SAME_DB
        evidence = shared.evidence()
        assert evidence["cuda_graphs_recorded"] == 4
        assert evidence["peer_1.cuda_graphs_recorded"] == 4
        assert evidence["peer_1.forwards"] == evidence["forwards_shared"] == evidence["cuda_graph_replays"]
        assert len(graphs) == 1
    assert not graphs, "NCCL would wait for their end for ever"
    cached = vivace.apply(even_flux(), "teacache(hits=0.5)")
    with vivace.apply(even_flux(), "parallel(ulysses)+teacache(hits=0.5)+cuda_graph") as shared:
        for _ in range(2):
            assert psnr(families.draw(shared), families.draw(cached)) > VERY_SAME_DB
        evidence = shared.evidence()
        assert evidence["cuda_graphs_recorded"] == 2, "a step, and a hit"
        assert evidence["peer_1.cuda_graphs_recorded"] == 1, "which is computed here alone"


def test_a_graph_that_one_process_lacks_is_no_silence() -> None:
    graphs = Replayed(lambda x: x, torch.device("cpu"), lambda work: (lambda: None, work()), 4)
    with pytest.raises(RuntimeError, match="not recorded"):
        _agree(graphs, False, (torch.ones(2),), {})
    graphs(torch.ones(2))
    _agree(graphs, False, (torch.zeros(2),), {})
    assert graphs.has((torch.ones(2),), {})
    _agree(graphs, True, (torch.ones(2),), {})
    assert not graphs.has((torch.ones(2),), {})


def test_graphs_that_each_process_records_by_itself_are_refused() -> None:
    with families.session("sd", "parallel(guidance)") as shared:
        (effect,) = [effect for label, effect in shared._applied if label.startswith("parallel")]
        end = effect.finish.__self__
        end._mode = "ulysses"
        shared.pipe.unet.forward.replays_graphs = True
        with pytest.raises(Unsupported, match="cuda_graph behind it"):
            end.finish()


def test_a_killed_process_is_told_at_once_and_the_others_end() -> None:
    shared = families.session("sd", "parallel(guidance, gpus=3)")
    first, second = pids(shared)
    families.draw(shared)
    timer = threading.Timer(0.5, os.kill, (first, signal.SIGKILL))
    timer.start()
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"\(pid {first}\) that computed on share 1 of 3 was killed \(SIGKILL\)"
    ):
        families.draw(shared, num_inference_steps=1000)
    assert time.monotonic() - start < 10
    assert ends(second), "they would wait for ever"
    with pytest.raises(WorkerError, match="load the model anew"):
        families.draw(shared)
    shared.close()
    with families.session("sd", "parallel(guidance)") as again:
        assert np.isfinite(families.draw(again)).all()


def test_what_fails_there_is_told_here() -> None:
    with families.session("sd", "parallel(guidance)") as shared:
        forward = shared.pipe.unet.forward
        # A size that a UNet's halvings and doublings do not meet again.
        with pytest.raises(WorkerError, match=r"ended \(1\): RuntimeError: mat1 and mat2"):
            forward(torch.zeros(2, 4, 9, 9), 1, encoder_hidden_states=torch.zeros(2, 77, 3))


_DRAWS_UNTIL_KILLED = """
import sys, torch, vivace
session = vivace.load("tiny-sd", "parallel(guidance)")
((_, effect),) = session._applied
print(*(process.pid for process in effect.close.__self__._processes), flush=True)
session("a red circle", num_inference_steps=1000)
"""


def test_nothing_outlives_the_process_that_draws() -> None:
    drawing = subprocess.Popen(
        [sys.executable, "-c", _DRAWS_UNTIL_KILLED],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert drawing.stdout is not None
    started = [int(word) for word in drawing.stdout.readline().split()]
    assert len(started) == 1
    time.sleep(1.0)
    assert drawing.poll() is None
    drawing.kill()
    drawing.wait()
    drawing.stdout.close()
    assert all(ends(pid) for pid in started)


def test_a_forgotten_session_leaves_nothing_running() -> None:
    import gc

    shared = families.session("sd", "parallel(guidance)")
    started = pids(shared)
    del shared
    gc.collect()
    assert all(ends(pid) for pid in started)
    assert not torch.distributed.is_initialized()


def test_a_forgotten_session_does_not_stand_in_the_next_ones_way() -> None:
    """A notebook's cell, run again: pipelines refer to themselves, and nothing has collected the first yet."""
    import gc

    gc.disable()
    try:
        first = pids(families.session("sd", "parallel(guidance)"))
        with families.session("sd", "parallel(guidance)") as second:
            assert all(ends(pid) for pid in first)
            families.draw(second)
    finally:
        gc.enable()


def test_a_bench_measures_it(tmp_path: Path) -> None:
    timing = Timing(rounds=1, repeats=1, max_warmup=1)
    records = vivace.bench(
        "tiny-sd",
        ["baseline", "parallel(guidance)"],
        num_inference_steps=4,
        timing=timing,
        device="cpu",
        store=tmp_path,
        rivals=False,
        scorer=None,
    )
    (record,) = [record for record in records if record.trial.recipe.text != "baseline"]
    assert record.outcome is Outcome.MEASURED, record.reason
    evidence = record.rounds[0].evidence
    assert evidence["peer_1.peak_bytes"] > 1e6
    assert evidence["forwards_shared"] > 0


@pytest.mark.parametrize(
    ("family", "recipe", "why"),
    [
        ("sd", "parallel(ulysses)", "no plan by which UNet2DConditionModel"),
        ("flux", "parallel(ring)+first_block_cache(0.2)", "own tokens"),
        ("flux", "parallel(ulysses)+teacache(hits=0.5)", "cannot be put together"),
        ("flux", "parallel(ulysses, gpus=4)", "5 attention heads"),
        ("flux", "parallel(ulysses)+compile(backend=eager)", "cannot follow"),
        ("sd", "parallel(guidance)+faster_cache", "both branches"),
        ("sd", "parallel(guidance)+layerwise_casting", "hooks hang"),
        ("sd", "parallel(guidance, messages=copies)", "attention sends nothing where rows are shared"),
        ("flux", "parallel(ulysses, messages=copies)", "heads that do not divide.*leave out messages=copies"),
    ],
)
def test_what_cannot_work_says_why(family: str, recipe: str, why: str) -> None:
    with pytest.raises(Unsupported, match=f"parallel: .*{why}"):
        families.session(family, recipe)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("has_triton", "reaches", "why"),
    [
        (True, True, None),
        (False, True, "triton is not installed; leave out messages=copies"),
        (True, False, "does not reach the memory of 1"),
    ],
)
def test_what_copies_need(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool, reaches: bool, why: str | None
) -> None:
    monkeypatch.setattr(Machine, "has_package", lambda self, name: has_triton)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reaches)
    target = target_of(Machine("cuda", "a GPU", (9, 0), None), None)
    reason = Parallel(mode="ring", messages="copies")._no_copies(target, by_diffusers=False)
    assert reason is None if why is None else reason is not None and why in reason


def test_a_script_of_it_says_that_it_needs_vivace() -> None:
    written = write_script(
        find_model("tiny-sd"), resolve("parallel(guidance)+steps(8)"), "cpu", prompt="a red circle"
    )
    assert written.own == ["parallel(guidance)"]
    assert 'vivace.apply(pipe, "parallel(guidance)")' in written.text
    assert not torch.distributed.is_initialized(), "it was applied to be written, and is over"


def test_what_cannot_be_pickled_is_told_before_anything_starts() -> None:
    pipe = families.build("sd")
    pipe.unet.conv_in.forward = lambda sample: sample
    with pytest.raises(Unsupported, match=r"parallel: the denoiser cannot be copied .*lambda"):
        vivace.apply(pipe, "parallel(guidance)")


def test_groups_are_not_split_off_one_that_is_bound_to_a_gpu() -> None:
    """PyTorch would end a process that was part of another group before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        world.bound_device_id = gpu = torch.device("cuda", 0)
        with pytest.raises(KeyError), _groups_made_anew():
            assert world.bound_device_id is None
            raise KeyError
        assert world.bound_device_id == gpu
    finally:
        dist.destroy_process_group()


def test_too_few_gpus_are_counted() -> None:
    def reason(num: int | None) -> str | None:
        target = target_of(Machine("cuda", "H200", (9, 0), None, num_gpus=num))
        return Parallel(mode="ring", gpus=4).unsupported(target)

    assert reason(4) is None
    assert reason(None) is None, "the hardware alone"
    assert "asked for 4 GPUs, and this process sees 2 GPUs" in str(reason(2))
    assert "sees 1 GPU " in str(reason(1))


def test_flux_alone_has_no_second_row() -> None:
    with families.session("flux", "parallel(guidance)") as shared:
        families.draw(shared)
        assert "no forward had two rows" in str(shared.refuted(shared.evidence()))


def test_rows_are_shared_out() -> None:
    assert shares(2, 2) == [slice(0, 1), slice(1, 2)]
    assert shares(5, 2) == [slice(0, 3), slice(3, 5)]
    assert len(shares(2, 4)) == 2
    given = {
        "sample": torch.arange(8.0).view(4, 2),
        "timestep": torch.tensor(3),
        "added": {"ids": torch.arange(4), "names": ["a"]},
        "txt_ids": torch.zeros(4, 3),
    }
    taken = rows_of(((), given), slice(2, 4), 4)[1]
    assert taken["sample"].tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert taken["added"]["ids"].tolist() == [2, 3]
    assert taken["timestep"].ndim == 0
    assert taken["txt_ids"].shape == (4, 3), "no row of the batch, though there are as many"


def test_arguments_arrive_as_they_were_sent() -> None:
    given = (
        (torch.randn(3, 5).t(), 7),
        {
            "mask": torch.tensor([True, False]),
            "half": torch.ones(1, dtype=torch.bfloat16),
            "none": None,
            "s": torch.tensor(2),
        },
    )
    header, tensors = take_apart(given, "cpu")
    shapes = shapes_in(header)
    buffer = pack(tensors, "cpu")
    assert buffer.numel() == num_bytes(shapes)
    args, kwargs = put_together(header, unpack(buffer, shapes))
    assert torch.equal(args[0], given[0][0])
    assert args[1] == 7
    assert kwargs["none"] is None
    assert all(
        torch.equal(kwargs[k], given[1][k]) and kwargs[k].dtype == given[1][k].dtype
        for k in ("mask", "half", "s")
    )


def test_what_is_set_for_the_process_is_told_to_the_others() -> None:
    assert {name for name, kind in TECHNIQUES.items() if kind.of_the_process} == {"tf32", "inference_mode"}


def _of_session(leader: int) -> list[str]:
    """The command lines of the processes of a session; dead ones that nobody has asked after have none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which is in brackets: state, parent, group, session.
            session = (folder / "stat").read_text().rpartition(")")[2].split()[3]
            if int(session) == leader:
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return [line for line in found if line]


@pytest.mark.parametrize("to_all", [True, False], ids=["as a terminal does", "to the first process alone"])
def test_generate_interrupted_leaves_no_process_and_no_traceback(tmp_path: Path, to_all: bool) -> None:
    command = [sys.executable, "-m", "vivace", "generate", "a red circle", "--model", "tiny-sd"]
    command += ["--recipe", "parallel(guidance)+steps(1000)", "--num-images", "50", "--out", str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Whatever runs the tests in the background ignores Ctrl-C, and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60
        while not any("runtime.peer" in line for line in _of_session(process.pid)):
            assert time.monotonic() < deadline, "the second process never started"
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        (os.killpg if to_all else os.kill)(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert _of_session(process.pid) == []
