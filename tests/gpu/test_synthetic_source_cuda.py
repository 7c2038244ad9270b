"""`synthetic:NAME` as a source of models on a GPU. `python -m pytest -m gpu tests/gpu`."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import vivace
from vivace.benchmark import Timing
from vivace.benchmark.rounds.work import plan_again
from vivace.benchmark.studies import start_launcher
from vivace.foundation.spec.record import Outcome

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _memory_released() -> Iterator[None]:
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("name", "dtype"), [("sdxl-lightning-2step", torch.float16), ("flux-schnell", torch.bfloat16)]
)
def test_a_loaded_model_is_on_the_gpu_in_the_published_precision(name: str, dtype: torch.dtype) -> None:
    session = vivace.load(f"synthetic:{name}", "tiny_vae")
    for part in session.pipe.components.values():
        if isinstance(part, torch.nn.Module):
            assert {(p.device.type, p.dtype) for p in part.parameters()} == {("cuda", dtype)}
    picture = session("a red circle", output_type="pt").images
    assert picture.shape == (1, 3, 1024, 1024)  # type: ignore[attr-defined]
    assert torch.isfinite(picture).all()


def test_bench_measures_it_and_plan_is_not_far_off(tmp_path: Path) -> None:
    recipes = ["baseline", "tiny_vae", "first_block_cache(0.1)", "first_block_cache(hits=0.5)"]
    timing = Timing(rounds=1, repeats=2, max_warmup=1)
    with start_launcher("cuda") as launcher:
        records = vivace.bench(
            "synthetic:flux-schnell",
            recipes,
            timing=timing,
            store=tmp_path / "s",
            rivals=False,
            launcher=launcher,
            device="cuda",
        )
        assert [record.outcome for record in records] == [
            Outcome.MEASURED, Outcome.MEASURED, Outcome.UNSUPPORTED, Outcome.MEASURED,
        ]  # fmt: skip
        predictions = plan_again(records, launcher)
    assert len(predictions) == 3
    for prediction in predictions:
        print(prediction)
        assert prediction.model_bytes is not None
        assert prediction.peak_bytes is not None
        assert abs(prediction.model_bytes / prediction.measured.model_bytes - 1) < 0.03
        assert abs(prediction.peak_bytes / prediction.measured.peak_bytes - 1) < 0.10
