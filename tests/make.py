"""Small valid records for tests."""

from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import ImageRecord, Memory, Outcome, Record, Round, Sample
from vivace.foundation.spec.trial import Model, Trial
from vivace.foundation.spec.workload import Workload
from vivace.recipes.resolve import resolve

PROMPTS = ("a red circle", "a blue square")


def make_environment() -> Environment:
    return Environment(
        vivace="0.1.0",
        source_revision=None,
        platform="Linux x86_64",
        python="3.11.7",
        device="cpu",
        device_name="Test CPU",
        device_capability=None,
        driver=None,
        cpu="Test CPU",
        num_cores=2,
        num_threads=1,
        memory_bytes=8_000_000_000,
        libraries={"torch": "2.13.0"},
        variables={},
    )


def make_trial(recipe: str, prompts: tuple[str, ...] = PROMPTS, model: str = "tiny-sd") -> Trial:
    return Trial(
        model=Model(name=model, source="embedded", revision="0" * 16),
        recipe=resolve(recipe).spec,
        workload=Workload(
            prompts=prompts, seeds=(0,), height=128, width=128, num_inference_steps=25, guidance_scale=4.0
        ),
        device="cpu",
    )


def make_round(
    index: int,
    times: tuple[float, ...] = (1.0, 1.1, 0.9),
    outcome: Outcome = Outcome.MEASURED,
    reason: str | None = None,
    prompts: tuple[str, ...] = PROMPTS,
) -> Round:
    if outcome is not Outcome.MEASURED:
        return Round(index=index, outcome=outcome, reason=reason, started_at="2026-01-01T00:00:00+00:00")
    return Round(
        index=index,
        outcome=outcome,
        started_at="2026-01-01T00:00:00+00:00",
        load_s=0.2,
        apply_s=0.01,
        first_call_s=1.5,
        warmup_s=(1.5,),
        steady=True,
        samples=tuple(
            Sample(
                picture=i % len(prompts),
                total_s=t,
                cpu_s=t,
                stages_s={"text": 0.01 * t, "steps": 0.8 * t, "vae": 0.1 * t, "other": 0.09 * t},
                num_denoiser_calls=25,
            )
            for i, t in enumerate(times)
        ),
        memory=Memory(
            kind="process resident set",
            before_bytes=350_000_000,
            model_bytes=400_000_000,
            peak_bytes=450_000_000,
            weights_bytes=27_000_000,
        ),
        pictures=tuple(
            ImageRecord(index=i, prompt=p, seed=0, sha256=f"{i:064x}") for i, p in enumerate(prompts)
        ),
    )


def make_record(recipe: str, *rounds: Round) -> Record:
    return Record(trial=make_trial(recipe), environment=make_environment(), rounds=rounds or (make_round(0),))
