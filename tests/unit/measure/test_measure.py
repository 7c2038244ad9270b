"""Stage times, memory and kernels of real calls."""

import subprocess
import sys
import time
from typing import Any

import pytest
import torch

import vivace
from vivace.measure.accelerator import PipelineTimer, weights_bytes
from vivace.measure.machine import probe_dtypes, slow_dtypes
from vivace.measure.profiling.profiler import attention_kernels
from vivace.measure.this_environment import conditions, environment


@pytest.fixture(scope="module")
def session() -> Any:
    torch.set_num_threads(1)
    return vivace.load("tiny-sd", "steps(4)")


def test_stages_add_up_to_the_call() -> None:
    session = vivace.load("tiny-sd", "steps(4)")
    timer = PipelineTimer(session.pipe, "cpu")
    for _ in range(2):
        start = time.perf_counter()
        result, sample = timer.time_call(lambda: session("a red circle"), image=7)
        around = time.perf_counter() - start
        assert result.images
        assert sample.picture == 7
        assert sample.num_denoiser_calls == 4
        assert sum(sample.stages_s.values()) == pytest.approx(sample.total_s)
        assert sample.stages_s["steps"] > sample.stages_s["vae"] > 0
        assert sample.stages_s["text"] > 0
        assert 0.9 * around < sample.total_s <= around


def test_a_slow_stage_shows_in_its_own_time() -> None:
    session = vivace.load("tiny-sd", "steps(2)")
    decode = session.pipe.vae.decode

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return decode(*args, **kwargs)

    session.pipe.vae.decode = slow
    timer = PipelineTimer(session.pipe, "cpu")
    _, sample = timer.time_call(lambda: session("a red circle"), image=0)
    assert sample.stages_s["vae"] > 0.3
    assert sample.stages_s["steps"] < sample.total_s - 0.3


def test_memory_sees_the_weights(session: Any) -> None:
    parameters = sum(
        p.numel() * p.element_size()
        for part in (session.pipe.unet, session.pipe.vae, session.pipe.text_encoder)
        for p in part.parameters()
    )
    assert parameters <= weights_bytes(session.pipe) <= parameters * 1.01
    halved = vivace.load("tiny-sd", "bf16")
    assert weights_bytes(halved.pipe) == pytest.approx(weights_bytes(session.pipe) / 2, rel=0.01)
    quantised = vivace.load("tiny-sd", "int8")
    assert weights_bytes(quantised.pipe) < weights_bytes(session.pipe) * 0.95


_PEAK = """
import types
import torch
from vivace.measure.accelerator import MemoryMeter

meter = MemoryMeter("cpu")
meter.loaded(types.SimpleNamespace())
ballast = torch.ones(200_000_000, dtype=torch.uint8)
del ballast
meter.start_peak()
before = meter.read()
ballast = torch.ones(100_000_000, dtype=torch.uint8)
after = meter.read()
assert after.before_bytes <= after.model_bytes <= after.peak_bytes
print(after.peak_bytes - before.peak_bytes)
"""


def test_the_peak_is_that_of_the_call_and_not_of_what_was_before() -> None:
    # In a process of its own: in this one, other tests' garbage may be freed at any moment.
    ended = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    assert 80e6 < int(ended.stdout) < 120e6


@pytest.mark.parametrize(("recipe", "kernel"), [("baseline", "flash"), ("attention(math)", "math")])
def test_the_kernels_that_ran_are_named(recipe: str, kernel: str) -> None:
    session = vivace.load("tiny-sd", recipe)
    parts = {"denoiser": session.pipe.unet, "vae": session.pipe.vae.decoder}
    seen = attention_kernels(parts, lambda: session("a red circle", num_inference_steps=1))
    inside = [name for name in seen if name.startswith("denoiser: ")]
    assert len(inside) == 1
    assert kernel in inside[0]
    assert [name for name in seen if name.startswith("vae: ")] == [
        "vae: _scaled_dot_product_flash_attention_for_cpu x1"
    ]
    assert session.refuted({"attention_kernels": seen}) is None


def test_the_environment_is_stable_and_has_no_moving_part() -> None:
    assert environment("cpu") == environment("cpu")
    now = conditions()
    assert "load_1min" in now
    assert 0.1 < float(now["python_ms"]) < 1000


def test_dtypes_are_measured() -> None:
    times = probe_dtypes("cpu")
    assert all(ms > 0 for ms in times.values())
    assert slow_dtypes({"fp32": 1.0, "bf16": 1.1, "fp16": 12.0}) == {"fp16": 12.0}
