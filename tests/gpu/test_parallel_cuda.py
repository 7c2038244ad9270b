"""One image over several GPUs. Run with `python -m pytest -m gpu tests/gpu/test_parallel_cuda.py` on two or more."""

import importlib.util
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import psnr, random_flux
from tests.lora_files import write_lora
from vivace.benchmark import Timing
from vivace.errors import WorkerError
from vivace.foundation.spec.record import Outcome
from vivace.machinery.multi_gpu.fused_exchange import SWITCH

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that this process sees"),
]
PROMPT = "a red circle above a blue square"
SAME_DB = 35.0  # in half precision, with other shapes of matrices and so other kernels


def draw(session: Any, prompt: Any = PROMPT, **call: Any) -> np.ndarray:
    generator = torch.Generator().manual_seed(0)
    arguments = {"num_inference_steps": 6, "output_type": "np"} | call
    return np.asarray(session(prompt, generator=generator, **arguments).images)


def even_flux() -> Any:
    """tiny-flux with a random transformer of four heads, which two GPUs split evenly."""
    return random_flux("cuda", num_attention_heads=4)


def wide_flux() -> Any:
    """tiny-flux with a random transformer of two heads of 128 channels, as FLUX.1's are."""
    wide = {"num_attention_heads": 2, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    return random_flux("cuda", torch.bfloat16, **wide)


def has_cudnn_fp8() -> bool:
    return (
        torch.cuda.is_available()
        and torch.cuda.get_device_capability() == (9, 0)
        and importlib.util.find_spec("cudnn") is not None
    )


def pids(session: Any) -> list[int]:
    (effect,) = [effect for label, effect in session._applied if label.startswith("parallel")]
    return [process.pid for process in effect.close.__self__._processes]


@pytest.mark.parametrize(
    "rest",
    ["", "+compile(backend=eager)", "+cuda_graph", "+quantize(int8)+channels_last", "+deepcache+compile"],
)
def test_the_branches_of_guidance_on_two_gpus(rest: str) -> None:
    expected = draw(vivace.load("tiny-sd", rest.removeprefix("+") or "baseline", device="cuda"))
    with vivace.load("tiny-sd", f"parallel(cfg){rest}", device="cuda") as sharded:
        assert psnr(draw(sharded), expected) > SAME_DB
        assert psnr(draw(sharded), expected) > SAME_DB, "and again"
        evidence = sharded.evidence()
        assert evidence["gpus"] == 2
        assert evidence["forwards_shared"] == 12
        assert evidence["peer_1.peak_bytes"] > 1e6
        assert sharded.refuted(evidence) is None


@pytest.mark.parametrize("recipe", ["bf16", "fused(bf16)+cuda_graph"])
def test_guidance_in_two_calls_on_two_gpus(recipe: str) -> None:
    """FLUX's true CFG: in the first step the first GPU makes both calls."""
    call: dict[str, Any] = SMALL | {"negative_prompt": "a blue square", "true_cfg_scale": 3.0}
    expected = draw(vivace.apply(even_flux(), recipe), **call)
    first, _, rest = recipe.partition("+")
    with vivace.apply(even_flux(), "+".join(filter(None, (first, "parallel(cfg)", rest)))) as sharded:
        for times in (1, 2):
            assert psnr(draw(sharded, **call), expected) > SAME_DB
            evidence = sharded.evidence()
            assert (evidence["forwards_shared"], evidence["forwards_alone"]) == (5 * times, 2 * times)
        assert sharded.refuted(evidence) is None


@pytest.mark.parametrize("mode", ["ulysses", "all_gather", "ring"])
@pytest.mark.parametrize("rest", ["", "+compile", "+compile(blocks=repeated)"])
def test_the_tokens_of_a_transformer_on_two_gpus(mode: str, rest: str) -> None:
    call = {"height": 128, "width": 128, "max_sequence_length": 32}
    expected = draw(vivace.apply(even_flux()), **call)
    with vivace.apply(even_flux(), f"parallel({mode}){rest}") as sharded:
        assert psnr(draw(sharded, **call), expected) > SAME_DB
        evidence = sharded.evidence()
        assert evidence["forwards_shared"] == 6
        assert evidence["messages_an_attention"] == (2 if mode == "ulysses" else 1)
        if mode != "ring":  # which is diffusers'
            assert evidence.get("graph_breaks", 0) == 0


SMALL = {"height": 128, "width": 128, "max_sequence_length": 32}
LARGER = {"height": 192, "width": 128, "max_sequence_length": 32}


@pytest.mark.parametrize("mode", ["ulysses", "all_gather"])
@pytest.mark.parametrize("compiled", ["", "+compile(blocks=repeated)", "+compile"])
def test_a_graph_contains_the_collectives(mode: str, compiled: str) -> None:
    """Captured and replayed at the same calls on both, anew for another size, and again in a later session."""
    alone = vivace.apply(even_flux())
    expected, larger = draw(alone, **SMALL), draw(alone, **LARGER)
    for _ in range(2):
        with vivace.apply(even_flux(), f"parallel({mode}){compiled}+cuda_graph") as sharded:
            assert psnr(draw(sharded, **SMALL), expected) > SAME_DB
            assert psnr(draw(sharded, **LARGER), larger) > SAME_DB
            assert psnr(draw(sharded, **SMALL), expected) > SAME_DB
            evidence = sharded.evidence()
            assert evidence["cuda_graphs_recorded"] == evidence["peer_1.cuda_graphs_recorded"] == 2
            assert evidence["cuda_graph_replays"] == evidence["peer_1.forwards"] == 18
            start = time.monotonic()
        assert time.monotonic() - start < 15, (
            "NCCL waits for the end of every graph that contains its collectives"
        )


def test_quantised_weights_are_sent_and_compiled() -> None:
    call = {"height": 128, "width": 128, "max_sequence_length": 32}
    expected = draw(vivace.apply(even_flux(), "quantize(fp8)"), **call)
    with vivace.apply(even_flux(), "quantize(fp8)+parallel(ulysses)+compile(blocks=repeated)") as sharded:
        # Where the arithmetic rounds otherwise, some activations round to another of fp8's few numbers.
        assert psnr(draw(sharded, **call), expected) > 25
        evidence = sharded.evidence()
        assert evidence["forwards_shared"] == evidence["peer_1.forwards"] == 6
        assert evidence["messages_an_attention"] == 2
        assert sharded.refuted(evidence) is None


@pytest.fixture(params=["gathers", "copies"])
def has_peer_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether GPUs copy keys and values to each other's memory, instead of gathering them by NCCL."""
    monkeypatch.setenv(SWITCH, "1" if request.param == "copies" else "0")
    return bool(request.param == "copies")


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("rest", ["", "+cuda_graph", "+teacache(hits=0.5)+cuda_graph"])
def test_fused_blocks_on_two_gpus(precision: str, rest: str, has_peer_memory: bool) -> None:
    expected = draw(vivace.apply(even_flux(), f"fused({precision}){rest}"), **SMALL)
    with vivace.apply(even_flux(), f"fused({precision})+parallel(all_gather){rest}") as sharded:
        for _ in range(2):
            assert psnr(draw(sharded, **SMALL), expected) > (SAME_DB if precision == "bf16" else 25)
        evidence = sharded.evidence()
        assert evidence["messages_an_attention"] == 1
        assert bool(evidence.get("peer_memory_bytes")) is has_peer_memory
        assert evidence["forwards_shared"] == evidence["peer_1.forwards"] > 0
        assert sharded.refuted(evidence) is None


@pytest.mark.skipif(not has_cudnn_fp8(), reason="needs Hopper and nvidia-cudnn-frontend")
@pytest.mark.usefixtures("has_peer_memory")
def test_fused_blocks_gather_keys_in_fp8() -> None:
    recipe = "fused(fp8, attention=fp8)"
    alone = vivace.apply(wide_flux(), f"{recipe}+cuda_graph")
    with vivace.apply(wide_flux(), f"{recipe}+parallel(all_gather)+cuda_graph") as sharded:
        for call in ({}, {"height": 160, "width": 96}, {"prompt": [PROMPT, "a blue square"]}, {}):
            arguments = SMALL | call
            assert psnr(draw(sharded, **arguments), draw(alone, **arguments)) > 25


@pytest.mark.parametrize("rest", ["", "+cuda_graph", "+compile(blocks=repeated)+cuda_graph"])
def test_a_step_cache_on_sharded_tokens(rest: str) -> None:
    expected = draw(vivace.apply(even_flux(), "teacache(hits=0.5)"), **SMALL)
    with vivace.apply(even_flux(), f"parallel(ulysses)+teacache(hits=0.5){rest}") as sharded:
        for _ in range(2):
            assert psnr(draw(sharded, **SMALL), expected) > SAME_DB
        evidence = sharded.evidence()
        assert evidence["forwards_alone"] == round(12 * evidence["cache_hit_rate"]) > 0
        assert evidence["forwards_shared"] == evidence["peer_1.forwards"] == 12 - evidence["forwards_alone"]


@pytest.mark.parametrize(
    ("recipe", "switch"),
    [
        ("parallel(ulysses)+cuda_graph", "0"),
        ("fused(bf16)+parallel(all_gather)+cuda_graph", "0"),
        ("fused(bf16)+parallel(all_gather)+cuda_graph", "1"),
    ],
)
def test_a_process_killed_while_graphs_are_replayed_is_told(
    recipe: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, switch)
    with vivace.apply(even_flux(), recipe) as sharded:
        draw(sharded, **SMALL)
        (pid,) = pids(sharded)
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(WorkerError, match="SIGKILL"):
            draw(sharded, **SMALL, num_inference_steps=1000)
        assert time.monotonic() - start < 20
    with vivace.apply(even_flux(), "parallel(ulysses)") as again:
        assert np.isfinite(draw(again, **SMALL)).all()


@pytest.mark.parametrize("rest", ["", "+compile(blocks=repeated)", "+cuda_graph"])
def test_a_step_waits_for_no_gpu(rest: str) -> None:
    with vivace.apply(even_flux(), f"parallel(ulysses){rest}") as sharded:
        draw(sharded, **SMALL)
        inner = sharded.pipe.transformer.forward
        calls = 0

        def strict(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return inner(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        sharded.pipe.transformer.forward = strict
        draw(sharded, **SMALL)
        assert calls == 6


def test_uneven_heads_are_padded() -> None:
    """Also in a process's second session, where PyTorch cannot split groups."""
    expected = draw(vivace.load("tiny-flux", device="cuda"))
    for _ in range(2):
        with vivace.load("tiny-flux", "parallel(ulysses)", device="cuda") as sharded:
            assert psnr(draw(sharded), expected) > SAME_DB


def test_all_gather_in_fp32_and_with_uneven_heads() -> None:
    expected = draw(vivace.load("tiny-flux", "fp32", device="cuda"))
    with vivace.load("tiny-flux", "fp32+parallel(all_gather)", device="cuda") as sharded:
        assert psnr(draw(sharded), expected) > SAME_DB


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("tiny-sd", "bf16+fused(fp8)+parallel(cfg)+cuda_graph"),
        ("tiny-flux", "bf16+fused(fp8)+parallel(all_gather)+cuda_graph"),
        ("tiny-flux", "bf16+parallel(all_gather)"),
    ],
)
def test_an_exchange_of_a_lora_reaches_every_gpu(model: str, recipe: str, tmp_path: Path) -> None:
    pipe = vivace.load(model, "baseline", device="cuda").pipe
    own, other = (
        write_lora(pipe, tmp_path / f"{rank}.safetensors", rank, rank, takes=lambda name: "blocks" in name)
        for rank in (4, 8)
    )
    lora = f"lora({own!r}, hot=True, max_rank=8)"
    alone = vivace.load(
        model, f"{'+'.join(p for p in recipe.split('+') if 'parallel' not in p)}+{lora}", device="cuda"
    )
    with vivace.load(model, f"{recipe}+{lora}", device="cuda") as session:
        first = draw(session)
        session.set_lora(other)
        alone.set_lora(other)
        assert psnr(draw(session), draw(alone)) > 20
        graphs = session.evidence().get("cuda_graphs_recorded")
        session.set_lora(own)
        assert np.array_equal(draw(session), first)
        assert session.evidence().get("cuda_graphs_recorded") == graphs


def test_a_bench_tells_what_the_other_gpu_held(tmp_path: Path) -> None:
    timing = Timing(rounds=1, repeats=2, max_warmup=1)
    (record,) = vivace.bench(
        "tiny-sd",
        ["parallel(cfg)"],
        timing=timing,
        device="cuda",
        store=tmp_path,
        quality=False,
        rivals=False,
    )
    assert record.outcome is Outcome.MEASURED, record.reason
    assert record.rounds[0].evidence["peer_1.peak_bytes"] > 1e6
