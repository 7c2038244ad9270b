"""Batches of images, and prompts encoded before the call."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vivace
from tests.make import make_environment, make_round, make_trial
from tests.typed import run_vivace as run
from vivace.benchmark import RunSettings, Store, Timing
from vivace.benchmark.rounds.runner import ask_largest_batch, largest, run_trials
from vivace.benchmark.rounds.worker_requests import LargestBatchRequest, RehearsalRequest, WorkerRequest
from vivace.benchmark.store.images import image_path
from vivace.errors import Unsupported, WorkerError
from vivace.foundation.processes.launcher import Ending
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import Workload
from vivace.report.rows import rows_of
from vivace.runtime.calls import encode

TIMING = Timing(rounds=1, repeats=3, max_warmup=1)
PROMPTS = ["a red circle", "a blue square", "a green star"]


def workload(batch: int, num_prompts: int = 3) -> Workload:
    return Workload(
        prompts=tuple(f"prompt {k}" for k in range(num_prompts)), seeds=(0,), height=128, width=128,
        num_inference_steps=2, guidance_scale=4.0, batch=batch,
    )  # fmt: skip


def test_every_call_has_the_same_shape_and_every_image_is_generated() -> None:
    assert [[index for index, _, _ in call] for call in workload(2).calls()] == [[0, 1], [2, 0]]
    assert [[index for index, _, _ in call] for call in workload(1).calls()] == [[0], [1], [2]]
    assert [[index for index, _, _ in call] for call in workload(7).calls()] == [[0, 1, 2, 0, 1, 2, 0]]


def bench(store: Path, batch: int = 1, text: str = "prompts") -> Record:
    (record,) = vivace.bench(
        "tiny-sd", ["baseline"], prompts=PROMPTS, num_inference_steps=2, batch=batch, text=text, timing=TIMING,
        store=store, device="cpu", quality=False,
    )  # fmt: skip
    return record


def pictures(record: Record, store: Path) -> list[np.ndarray]:
    paths = [image_path(store / "pictures", p.sha256) for p in record.rounds[0].pictures]
    return [np.asarray(Image.open(io.BytesIO(path.read_bytes())), dtype=int) for path in paths]


@pytest.mark.long
def test_a_batch_generates_the_same_images_and_times_are_per_image(tmp_path: Path) -> None:
    alone, together = bench(tmp_path), bench(tmp_path, batch=2)
    assert [p.prompt for p in together.rounds[0].pictures] == PROMPTS
    for a, b in zip(pictures(alone, tmp_path), pictures(together, tmp_path), strict=True):
        assert abs(a - b).max() <= 2
    (row,) = rows_of([together])
    assert row.latency is not None
    medians = sorted(s.total_s for s in together.rounds[0].samples)
    assert row.latency.median.point == pytest.approx(medians[1] / 2)
    assert sum(row.stages_s.values()) <= row.latency.max_s * 1.05
    answer = row.to_json()
    assert answer["batch"] == 2
    assert answer["images_per_s"] == pytest.approx(2 / medians[1])
    assert alone.trial.key(alone.environment) != together.trial.key(together.environment)


def test_embeddings_follow_the_guidance_in_use() -> None:
    session = vivace.load("tiny-sd", "guidance(0)+steps(1)", device="cpu")
    assert set(encode(session, PROMPTS)) == {"prompt_embeds"}
    session = vivace.load("tiny-sd", "steps(1)", device="cpu")
    embeddings = encode(session, PROMPTS)
    assert set(embeddings) == {"prompt_embeds", "negative_prompt_embeds"}
    assert embeddings["prompt_embeds"].shape[0] == 3
    drawn = session(**embeddings, generator=[torch.Generator().manual_seed(0)] * 3).images
    assert len(drawn) == 3


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 63, 64, 65, 1000, 4096, 9999])
def test_the_largest_batch_is_found_in_few_tries(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert batch not in tried
        tried.append(batch)
        return batch <= most

    largest_batch = largest(fits)
    assert largest_batch <= min(most, 4096)
    assert min(most, 4096) - largest_batch <= max(0, largest_batch // 16)
    assert len(tried) <= 18


class FakeGpu:
    """A fake launcher: `found` images fit in the process that searches, `holds` in a fresh process."""

    def __init__(self, largest_batch: int, holds: int, ending: Ending | None = None) -> None:
        self.proposed, self.holds, self.ending = largest_batch, holds, ending
        self.attempts: list[tuple[WorkerRequest, float]] = []

    def run(self, request: WorkerRequest, timeout_s: float, on_event: Any = None) -> Ending:
        self.attempts.append((request, timeout_s))
        if isinstance(request, LargestBatchRequest):
            return Ending({"batch": self.proposed})
        if self.ending is not None:
            return self.ending
        assert isinstance(request, RehearsalRequest)
        batch = request.trial.workload.batch
        return Ending({"why_not": None if batch <= self.holds else "Tried to allocate 32.00 GiB"})

    @property
    def rehearsed(self) -> list[int]:
        return [r.trial.workload.batch for r, _ in self.attempts if isinstance(r, RehearsalRequest)]


def on_a_gpu(recipe: str = "baseline") -> Trial:
    return make_trial(recipe).model_copy(update={"device": "cuda"})


def test_the_largest_batch_is_checked_in_a_fresh_process() -> None:
    gpu = FakeGpu(largest_batch=32, holds=26)
    assert ask_largest_batch(gpu, on_a_gpu(), TIMING) == 26
    assert gpu.rehearsed == [32, 30, 29, 28, 27, 26]
    for request, timeout_s in gpu.attempts[1:]:
        assert isinstance(request, RehearsalRequest)
        assert request.timing == TIMING
        assert timeout_s == TIMING.timeout_s
    gpu = FakeGpu(largest_batch=32, holds=32)
    assert ask_largest_batch(gpu, on_a_gpu(), TIMING) == 32
    assert gpu.rehearsed == [32], "rehearsed only once"


@pytest.mark.parametrize(("largest_batch", "rehearsed"), [(0, []), (2, [2, 1])])
def test_not_even_one_image_fits(largest_batch: int, rehearsed: list[int]) -> None:
    gpu = FakeGpu(largest_batch, holds=0)
    with pytest.raises(Unsupported, match="not even one image of tiny-sd"):
        ask_largest_batch(gpu, on_a_gpu(), TIMING)
    assert gpu.rehearsed == rehearsed


def test_a_crashed_rehearsal_is_not_a_batch_that_does_not_fit() -> None:
    late = FakeGpu(8, 8, Ending(None, timed_out=True))
    with pytest.raises(WorkerError, match=r"longer than 600 s \(rehearsal\)"):
        ask_largest_batch(late, on_a_gpu(), TIMING)
    dead = FakeGpu(8, 8, Ending(None, signal=11, log="illegal memory access"))
    with pytest.raises(WorkerError, match="illegal memory access"):
        ask_largest_batch(dead, on_a_gpu(), TIMING)


def test_an_out_of_memory_round_names_the_largest_batch(tmp_path: Path) -> None:
    class Full:
        def run(self, request: dict[str, Any], *_: Any) -> Ending:
            failed = make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="Tried to allocate 32.00 GiB")
            return Ending(failed.model_dump(mode="json"))

    trials = [on_a_gpu(), on_a_gpu("tiny_vae")]
    with Store.create(tmp_path) as store:
        store.start_run("vivace bench", trials, make_environment(), None)
        settings = RunSettings(launcher=Full())
        records = run_trials(trials, make_environment(), TIMING, store, settings, largest_batch=True)
        own, other = (record.reason or "" for record in records)
        assert own.startswith("Tried to allocate 32.00 GiB; --batch max found that 1 fits, in a rehearsal")
        assert "give a smaller number" in own
        assert "--batch max found 1 for baseline, and this recipe needs more memory" in other


@pytest.mark.parametrize("value", ["0", "1,,2", "many", "-1", "5000"])
def test_wrong_batches(tmp_path: Path, value: str) -> None:
    done = run(tmp_path, "bench", "--recipe", "baseline", f"--batch={value}", code=2)
    assert "whole numbers from 1 to 4096, or max" in done.stderr
    assert not (tmp_path / ".vivace").exists()
