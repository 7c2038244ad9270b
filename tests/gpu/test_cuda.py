"""What only a CUDA device can show. Run with `python -m pytest -m gpu tests/gpu`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.contract.test_technique_contract import RECIPES
from tests.faulty_worker import COMMAND, Fault
from vivace.benchmark import Timing
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.studies import start_launcher
from vivace.errors import NoEffect, Unsupported
from vivace.foundation.spec.record import Outcome
from vivace.measure.profiling.profiler import attention_kernels
from vivace.techniques import TECHNIQUES

pytestmark = pytest.mark.gpu
PROMPT = "a red circle above a blue square"


def draw(session: Any, **call: Any) -> np.ndarray:
    return np.asarray(
        session(PROMPT, generator=torch.Generator().manual_seed(0), output_type="np", **call).images[0]
    )


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    error = float(np.mean((a - b) ** 2))
    return 200.0 if error == 0 else -10 * np.log10(error)


@pytest.fixture(scope="module")
def reference() -> np.ndarray:
    return draw(vivace.load("tiny-sd", "baseline", device="cuda"))


def test_the_baseline_is_fp16_and_agrees_with_the_cpu(reference: np.ndarray) -> None:
    session = vivace.load("tiny-sd", device="cuda")
    assert session.pipe.unet.dtype == torch.float16
    on_cpu = draw(vivace.load("tiny-sd", device="cpu"))
    assert psnr(reference, on_cpu) > 25


@pytest.mark.parametrize(("name", "recipe"), RECIPES, ids=[r for _, r in RECIPES])
def test_every_technique_works_on_cuda_or_says_why_not(name: str, recipe: str, reference: np.ndarray) -> None:
    try:
        session = vivace.load("tiny-sd", recipe, device="cuda")
    except Unsupported as error:
        assert len(str(error)) > len(name) + 20
        return
    except NoEffect as error:
        assert error.already_so
        return
    with session:
        picture = draw(session)
    assert np.isfinite(picture).all()
    assert session.effects
    if TECHNIQUES[name].declared.same_picture:
        assert psnr(picture, reference) > 22


@pytest.mark.parametrize("backend", ["math", "efficient", "flash", "cudnn"])
def test_the_attention_kernel_that_was_asked_for_is_the_one_that_runs(backend: str) -> None:
    try:
        session = vivace.load("tiny-sd", f"attention({backend})", device="cuda")
    except NoEffect as error:
        assert error.already_so
        session = vivace.load("tiny-sd", device="cuda")
    kernels = attention_kernels({"denoiser": session.pipe.unet}, lambda: draw(session, num_inference_steps=1))
    assert kernels
    assert all(backend in kernel for kernel in kernels if kernel.startswith("denoiser")), kernels
    assert session.refuted({"attention_kernels": kernels}) is None


def test_cuda_graphs_do_not_overwrite_what_a_scheduler_keeps() -> None:
    eager = draw(vivace.load("tiny-sd", "scheduler(pndm)+guidance(1)", device="cuda"))
    session = vivace.load("tiny-sd", "scheduler(pndm)+guidance(1)+compile(reduce-overhead)", device="cuda")
    for _ in range(3):
        picture = draw(session)
    assert psnr(picture, eager) > 30


@pytest.mark.parametrize("name", ["pndm", "ddim", "lcm", "euler", "dpmpp_2m"])
def test_timesteps_from_the_host_are_those_of_the_device(name: str) -> None:
    """Text encoder, denoiser and decoder in graphs, and no step that waits for the GPU."""
    eager = draw(vivace.load("tiny-sd", f"scheduler({name})", device="cuda"))
    session = vivace.load("tiny-sd", f"scheduler({name})+cuda_graph@denoiser,text_encoder,vae", device="cuda")
    for _ in range(3):
        assert psnr(draw(session), eager) > 30
    assert session.evidence()["timesteps_from_host"]


def test_a_bench_on_cuda(tmp_path: Path) -> None:
    recipes = ["baseline", "tiny_vae", "bf16+compile+cfg_cutoff(0.4)", "attention(efficient)"]
    timing = Timing(rounds=2, repeats=5, max_warmup=6, timeout_s=240)
    records = vivace.bench("tiny-sd", recipes, timing=timing, store=tmp_path / "s", device="cuda")
    assert [r.outcome for r in records] == [Outcome.MEASURED] * 4, [r.reason for r in records]
    for record in records:
        assert record.environment.device == "cuda"
        assert record.environment.driver
        for round_ in record.rounds:
            assert round_.memory is not None
            assert round_.memory.kind == "device memory allocated"
            assert 0 < round_.memory.weights_bytes <= round_.memory.model_bytes * 1.01 + 4096
            assert round_.memory.model_bytes < round_.memory.peak_bytes
            slowest = max(sample.total_s for sample in round_.samples)
            assert round_.gpu_busy_s is not None
            assert 0.01 * slowest < round_.gpu_busy_s < 1.1 * slowest
            for sample in round_.samples:
                assert sample.stages_s["steps"] > 0
                assert sum(sample.stages_s.values()) <= sample.total_s * 1.02
    assert records[2].rounds[0].evidence["guided_steps"] == 10
    assert records[2].rounds[0].evidence["compiled_graphs"]
    efficient = records[3].rounds[0].evidence["attention_kernels"]
    assert isinstance(efficient, list)
    assert any("denoiser: _scaled_dot_product_efficient" in k for k in efficient)


def test_faults_on_cuda_are_typed_and_harm_no_other_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TECHNIQUES, "fault", Fault)
    timing = Timing(rounds=1, repeats=1, max_warmup=1, timeout_s=60)
    with start_launcher("cuda", COMMAND) as launcher:
        records = vivace.bench(
            "tiny-sd",
            ["baseline", "fault(cuda_oom)", "fault(segfault)", "tiny_vae"],
            timing=timing,
            store=tmp_path / "s",
            device="cuda",
            launcher=launcher,
        )
    outcomes = [r.outcome for r in records]
    assert outcomes == [Outcome.MEASURED, Outcome.OUT_OF_MEMORY, Outcome.CRASHED, Outcome.MEASURED]


def test_the_largest_batch_is_found_and_measured(tmp_path: Path) -> None:
    # A large model, since the search draws until the card is full.
    records = vivace.bench(
        "synthetic:sdxl", ["baseline"], batch="max", num_inference_steps=1,
        timing=Timing(rounds=1, repeats=1, max_warmup=1), store=tmp_path, quality=False,
    )  # fmt: skip
    workload = records[0].trial.workload
    print(workload.batch)
    assert records[0].outcome is Outcome.MEASURED, (workload.batch, records[0].reason)
    assert workload.batch > 4


def test_rounds_are_forked_from_a_process_that_never_woke_the_driver() -> None:
    with start_launcher("cuda") as launcher:
        environment = ask_environment(launcher, "cuda", None)
        assert environment.device == "cuda"
        assert launcher.forks
