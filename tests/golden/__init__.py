"""The words of commands: an answer of each, and the files that hold them.

python -m tests.golden      writes the files anew; read the difference before you commit it
"""

import math
from collections.abc import Callable
from pathlib import Path

from tests.make import make_record, make_round
from tests.unit.recommendation.tables import ask, evidence, table
from tests.unit.report.test_run_answer import with_quality
from tests.unit.studies.test_sittings import FEW, VAE, lasting, run, sitting
from vivace.answers.answer import Answer
from vivace.answers.terminal import text_of
from vivace.benchmark import pairs
from vivace.benchmark.load_testing import load_answer
from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage, RequestSettings, Samples
from vivace.benchmark.pairs import Paired
from vivace.evidence.recommendation.answer import answer_of as recommendation_answer
from vivace.evidence.studies import study_answer
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.foundation.stats.sequential import Decision
from vivace.recipes.resolve import resolve
from vivace.report import rows_of, run_answer
from vivace.tuning import answer as tune_answer
from vivace.tuning.answer import Tuned
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.search import ExpectedGain, Explanation

FOLDER = Path(__file__).parent


def load() -> Answer:
    """One client, eight of whom one in ten is refused, and users."""

    def row(number: int, gap: float, took: float, stage: LoadStage, rate: float | None = None) -> LoadRow:
        due = tuple(gap * k for k in range(number))
        refused = stage.clients == 8
        samples = Samples(
            due_s=due,
            sent_s=due,
            ended_s=tuple(each + took * (1 + 0.02 * (k % 5)) for k, each in enumerate(due)),
            outcome=tuple("HTTP 429" if refused and k % 10 == 0 else "done" for k in range(number)),
            variant=(0,) * number,
            phases_ms={"denoise": (820.0,) * number},
        )
        request = RequestSettings(
            model="sdxl",
            fields={"num_inference_steps": 20},
            variants=(("512x512", None),),
            prompts_sha256="0",
        )
        return LoadRow(
            label="http://gpu:8000/v1",
            request=request,
            server={"recipe": "bf16+compile"},
            client={},
            began="2026-01-01T00:00:00+00:00",
            stage=stage,
            rate=rate,
            slo_s=(2.7,),
            samples=samples,
        )

    rows = [
        row(30, 1.0, 0.9, LoadStage(kind="closed", clients=1)),
        row(80, 0.25, 2.0, LoadStage(kind="closed", clients=8)),
        row(60, 0.5, 1.2, LoadStage(kind="poisson", fraction=0.8), 2.0),
    ]
    return load_answer.answer_of(rows, rows[:1])


def compare() -> Answer:
    ratio = Interval(0.5, 0.48, 0.52)
    records = (make_record("baseline", make_round(0)), make_record("tiny_vae", make_round(0)))
    return pairs.answer_of(Paired(Decision(Verdict.FASTER, None, ratio, 4), records, "verdict"))


def tune() -> Answer:
    def result(
        recipe: str, times: float, rung: Rung, gate: Gate | None = None, reason: str | None = None
    ) -> Result:
        return Result(
            resolve(recipe),
            Outcome.MEASURED,
            rung,
            math.log(times),
            0.02,
            seconds=1 / times,
            peak_bytes=4.5e8,
            first_call_s=1.5,
            gate=gate,
            reason=reason,
        )

    history = (
        result("baseline", 1.0, Rung.FINAL, Gate.PASSED),
        result("tiny_vae+steps(8)", 2.5, Rung.FINAL, Gate.PASSED),
        result("steps(8)", 2.0, Rung.FINAL, Gate.PASSED),
        result("steps(4)", 5.0, Rung.JUDGED, Gate.FAILED, "CLIP margin kept 61.0 %, the limit is 95 %"),
    )
    times = {
        "baseline": (1.0, 1.01, 0.99),
        "steps(8)": (0.5, 0.51, 0.49),
        "tiny_vae+steps(8)": (0.4, 0.41, 0.39),
    }
    records = [make_record(text, *(make_round(i, of) for i in range(2))) for text, of in times.items()]
    return tune_answer.answer_of(
        Tuned(
            model="tiny-sd",
            device_name="Test CPU",
            objective=Objective(),
            pick=history[1],
            rows=tuple(rows_of(records)),
            history=history,
            cut={"cuda_graph": "needs a GPU"},
            notes=("every recipe that promised a gain was measured",),
            store=Path("none"),
            judges=True,
            num_trials=4,
            seconds=200.0,
            command="vivace tune tiny-sd --minutes 3",
            explanation=Explanation(
                (ExpectedGain("tiny_vae", 1.3, 1.2, 1.4, was_tried=True),), 31, (("this store", 7),)
            ),
        )
    )


def recommend() -> Answer:
    rows = (
        evidence("bf16+fuse_qkv", 1.1),
        evidence("compile", 1.8, first_call_s=60.0),
        evidence("channels_last", 1.79),
    )
    return recommendation_answer(ask(table(*rows, kind="committed", place="results/x.json")))


def study() -> Answer:
    lost = make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="too large")
    return study_answer.answer_of(run(sitting(baseline=lasting(1.0), **{VAE: lasting(0.5), FEW: lost})))


ANSWERS: dict[str, Callable[[], Answer]] = {
    "bench": lambda: run_answer.answer_of(with_quality()),
    "bench-endpoint": load,
    "compare": compare,
    "recommend": recommend,
    "study": study,
    "tune": tune,
}


def written(name: str) -> str:
    """Return an answer as a terminal of 120 characters shows it."""
    return text_of(ANSWERS[name](), width=120)
