"""Several pictures in one call, and prompts that were encoded before it."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vivace
from tests.typed import said as run
from tests.unit.cli.test_commands import QUICK
from vivace.benchmark import Plan
from vivace.benchmark.fitting import largest, settled
from vivace.benchmark.prepare import prepare
from vivace.benchmark.store import picture_path
from vivace.errors import WorkloadError
from vivace.report.rows import rows_of
from vivace.runtime.embeddings import encode
from vivace.spec.record import Record
from vivace.spec.workload import Workload

PLAN = Plan(rounds=1, repeats=3, max_warmup=1)
PROMPTS = ["a red circle", "a blue square", "a green star"]


def workload(batch: int, num_prompts: int = 3) -> Workload:
    return Workload(
        prompts=tuple(f"prompt {k}" for k in range(num_prompts)), seeds=(0,), height=128, width=128,
        num_inference_steps=2, guidance_scale=4.0, batch=batch,
    )  # fmt: skip


def test_every_call_has_the_same_shape_and_every_picture_its_turn() -> None:
    assert [[index for index, _, _ in call] for call in workload(2).calls()] == [[0, 1], [2, 0]]
    assert [[index for index, _, _ in call] for call in workload(1).calls()] == [[0], [1], [2]]
    assert [[index for index, _, _ in call] for call in workload(7).calls()] == [[0, 1, 2, 0, 1, 2, 0]]


def bench(store: Path, batch: int = 1, text: str = "prompts") -> Record:
    (record,) = vivace.bench(
        "tiny-sd", ["baseline"], prompts=PROMPTS, num_inference_steps=2, batch=batch, text=text, plan=PLAN,
        store=store, device="cpu", quality=False,
    )  # fmt: skip
    return record


def pictures(record: Record, store: Path) -> list[np.ndarray]:
    paths = [picture_path(store / "pictures", p.sha256) for p in record.rounds[0].pictures]
    return [np.asarray(Image.open(io.BytesIO(path.read_bytes())), dtype=int) for path in paths]


def test_a_batch_draws_the_same_pictures_and_its_times_are_a_pictures_share(tmp_path: Path) -> None:
    alone, together = bench(tmp_path), bench(tmp_path, batch=2)
    assert [p.prompt for p in together.rounds[0].pictures] == PROMPTS
    for a, b in zip(pictures(alone, tmp_path), pictures(together, tmp_path), strict=True):
        assert abs(a - b).max() <= 2
    (row,) = rows_of([together])
    assert row.latency is not None
    medians = sorted(s.total_s for s in together.rounds[0].samples)
    assert row.latency.median.point == pytest.approx(medians[1] / 2)
    assert sum(row.stages_s.values()) <= row.latency.max_s * 1.05
    found = row.to_json()
    assert found["batch"] == 2
    assert found["images_per_s"] == pytest.approx(2 / medians[1])
    assert alone.trial.key(alone.environment) != together.trial.key(together.environment)


def test_embeddings_leave_the_text_encoder_out(tmp_path: Path) -> None:
    words, embedded = bench(tmp_path), bench(tmp_path, text="embeddings")
    for a, b in zip(pictures(words, tmp_path), pictures(embedded, tmp_path), strict=True):
        assert (a == b).all()

    def text_s(record: Record) -> float:
        return min(sample.stages_s["text"] for sample in record.rounds[0].samples)

    assert text_s(embedded) < text_s(words) / 3


def test_embeddings_follow_the_guidance_that_is_in_force() -> None:
    session = vivace.load("tiny-sd", "guidance(0)+steps(1)", device="cpu")
    assert set(encode(session, PROMPTS)) == {"prompt_embeds"}
    session = vivace.load("tiny-sd", "steps(1)", device="cpu")
    said = encode(session, PROMPTS)
    assert set(said) == {"prompt_embeds", "negative_prompt_embeds"}
    assert said["prompt_embeds"].shape[0] == 3
    drawn = session(**said, generator=[torch.Generator().manual_seed(0)] * 3).images
    assert len(drawn) == 3


def test_several_batches_make_several_tables(tmp_path: Path) -> None:
    done = run(
        tmp_path, "bench", "--recipe", "baseline", "--batch", "1,2,2", "--no-quality", *QUICK
    ).stdout.splitlines()
    assert [line for line in done if line.startswith("tiny-sd")] == ["tiny-sd", "tiny-sd, batch 2"]


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 63, 64, 65, 1000, 4096, 9999])
def test_the_largest_batch_is_found_in_few_tries(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert batch not in tried
        tried.append(batch)
        return batch <= most

    found = largest(fits)
    assert found <= min(most, 4096)
    assert min(most, 4096) - found <= max(0, found // 16)
    assert len(tried) <= 18


@pytest.mark.parametrize("most", [2, 3, 7, 63, 64, 65, 1000, 4096, 9999])
@pytest.mark.parametrize(
    ("factor", "num_tries"), [(0.0, 18), (0.5, 13), (0.95, 7), (1.0, 6), (1.05, 7), (3.0, 12)]
)
def test_a_good_guess_saves_tries_and_a_bad_one_does_no_harm(
    most: int, factor: float, num_tries: int
) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        assert batch not in tried
        assert 1 <= batch <= 4096
        tried.append(batch)
        return batch <= most

    found = largest(fits, lambda: int(factor * most))
    assert found <= min(most, 4096)
    assert min(most, 4096) - found <= max(0, found // 16)
    assert len(tried) <= num_tries


@pytest.mark.parametrize(
    ("found", "holds"), [(64, 64), (64, 60), (64, 1), (1000, 990), (3, 2), (1, 0), (0, 0)]
)
def test_a_batch_that_fits_once_must_fit_again(found: int, holds: int) -> None:
    batch = settled(found, lambda batch: batch <= holds)
    assert batch <= holds
    assert holds - batch <= max(0, found // 16)


def test_the_largest_batch_is_a_gpus_question(tmp_path: Path) -> None:
    done = run(tmp_path, "bench", "--recipe", "baseline", "--batch", "max", "--device", "cpu", code=3)
    assert "--batch max needs a GPU" in done.stderr


@pytest.mark.parametrize("value", ["0", "1,,2", "many", "-1", "5000"])
def test_wrong_batches(tmp_path: Path, value: str) -> None:
    done = run(tmp_path, "bench", "--recipe", "baseline", f"--batch={value}", code=2)
    assert "whole numbers from 1 to 4096 or max" in done.stderr
    assert not (tmp_path / ".vivace").exists()


def test_wrong_text_from_python() -> None:
    with pytest.raises(WorkloadError, match="--text 'tokens'"):
        prepare("tiny-sd", ["baseline"], text="tokens")
