"""What recipes compute, counted without weights, and stored beside the ceilings."""

from pathlib import Path

import pytest

import vivace
from benchmarks.flops import count_denoiser
from tests.make import make_environment, make_trial
from tests.unit.report.test_limit import CEILINGS
from vivace.benchmark import Store, Timing
from vivace.benchmark.rounds import work
from vivace.benchmark.rounds.work import count_work
from vivace.foundation.spec.ceilings import ComponentWork, Work, identity_of
from vivace.foundation.spec.environment import Environment
from vivace.runtime.memory.weightless import find_weightless

STEPS = 4


def counted(
    recipe: str,
    calls: int | None = None,
    hits: float | None = None,
    steps: int = STEPS,
    **environment: str,
) -> Work:
    trial = make_trial(recipe)
    trial = trial.model_copy(
        update={"workload": trial.workload.model_copy(update={"num_inference_steps": steps})}
    )
    facts = make_environment().model_copy(update=environment)
    return count_work(trial, facts, hits, steps if calls is None else calls)


def part(counts: Work, name: str = "denoiser") -> ComponentWork:
    assert counts.reason is None
    return next(c for c in counts.components if c.component == name)


def flop(component: ComponentWork) -> int:
    return component.gemm_flop + component.conv_flop + component.attention_flop


@pytest.fixture(scope="module")
def baseline() -> Work:
    return counted("baseline")


def test_the_count_is_that_of_the_models_own_steps(baseline: Work) -> None:
    pipe = find_weightless("tiny-sd").build()
    length = pipe.tokenizer.model_max_length
    step = count_denoiser(pipe.unet, height=128, width=128, text_length=length, batch=2, vae_factor=8)
    denoiser = part(baseline)
    assert flop(denoiser) == STEPS * step.total
    assert denoiser.attention_flop == STEPS * step.attention
    assert (denoiser.gemm, denoiser.conv, denoiser.attention) == ("fp32",) * 3
    assert denoiser.weights_bytes == 4 * sum(p.numel() for p in pipe.unet.parameters())
    table = pipe.text_encoder.get_input_embeddings().weight
    encoder = sum(p.numel() for p in pipe.text_encoder.parameters())
    assert part(baseline, "text_encoder").weights_bytes < 4 * (encoder - table.numel()) + 1


@pytest.mark.long
def test_a_step_cache_is_counted_with_the_hits_that_were_measured(baseline: Work) -> None:
    cached = part(counted("deepcache(2)", hits=0.5))
    assert (cached.calls, cached.computed) == (STEPS, STEPS // 2)
    assert flop(part(baseline)) / 2 < flop(cached) < flop(part(baseline))
    reason = counted("deepcache(2)", hits=0.97).reason
    assert reason is not None
    assert "97% were measured" in reason


def test_a_gpu_computes_convolutions_in_tf32_unless_told_otherwise() -> None:
    gpu = {"device": "cuda", "device_name": "a GPU"}
    single = part(counted("fp32", steps=1, **gpu))
    assert (single.gemm, single.conv) == ("fp32", "tf32")
    assert part(counted("fp32+tf32", steps=1, **gpu)).gemm == "tf32"


def test_a_count_that_does_not_match_the_measurement_is_no_count() -> None:
    assert counted("baseline", calls=7, steps=1).reason == (
        "the count has 1 calls of the denoiser, and a timed call had 7"
    )


def test_a_bench_stores_work_and_ceilings_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> vivace.Run:
        return vivace.bench(
            "tiny-sd",
            ["baseline", "steps(1)"],
            num_inference_steps=2,
            quality=False,
            timing=Timing(rounds=1, repeats=1, max_warmup=1),
            store=tmp_path / "store",
        )

    assert all(row.limit is None for row in run().rows()), "nobody measured the ceilings"

    def ceilings_of(environment: Environment) -> object:
        fast = [c.model_copy(update={"precision": c.precision and "fp32"}) for c in CEILINGS.ceilings]
        identity = identity_of(environment).model_dump()
        return CEILINGS.model_copy(update={**identity, "ceilings": tuple(fast)})

    monkeypatch.setattr(work, "known_ceilings", ceilings_of)
    rows = run().rows()
    assert [row.record.rounds[0].started_at for row in rows], "measured before, and not measured again"
    shares = [row.limit.share for row in rows if row.limit is not None]
    assert len(shares) == 2
    assert all(share is not None and 0 < share < 1 for share in shares)
    with Store.read_only(tmp_path / "store") as store:
        kept = [store.rounds(key)[0] for key in store.runs()[-1].keys]
    assert all(round_.work and round_.ceilings and round_.samples for round_ in kept)

    def refuse(*_: object) -> None:
        raise AssertionError("counted again")

    monkeypatch.setattr(work, "count_by_worker", refuse)
    assert [row.limit for row in run().rows()] == [row.limit for row in rows]
