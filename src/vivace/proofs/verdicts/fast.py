"""Fast? The seconds of B's images beside A's of the same prompt, seed and size, from the run that drew them.

The first image of each size after a side is opened is a warm-up and has no seconds. A is drawn before B, and a machine
gets warmer or busier meanwhile; so for the claim A is drawn again after B, and the answer must hold for both. A
server's seconds include encoding and transfer, since its users wait for both.

Endpoints may also be put under load, after their images are drawn: one client, eight of them, and users who come at
random, with the requests of `vivace bench --endpoint`, and the prompts, sizes and settings of the proof. An image is in
time within three times A's median latency, for both sides, so that their goodput can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import Field

from vivace.answers.formatting import count
from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage, read_rows, write_rows
from vivace.benchmark.load_testing.load_target import LoadTarget, Variant
from vivace.benchmark.load_testing.stages import LoadPlan, measure
from vivace.errors import UsageError, VivaceError
from vivace.foundation.spec.settings import Option, Settings
from vivace.foundation.stats import Equivalence, EquivalenceTest, equivalence
from vivace.proofs.checks.pair_figures import PairFigures
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.verdicts.same import ProofAnswer, ProofVerdict, decide, difference_in_words

MARGIN = math.log(1.05)
"""Margin of the logarithm of the ratio: up to 5 % more time is not slower."""
_LEAST_S = 1e-6
_LEAST_REQUESTS = 8  # one for each client
_SLO_FACTOR = 3.0
_NAMES: dict[Letter, Literal["A", "B"]] = {"a": "A", "b": "B"}
OnLoad = Callable[[str], object]
"""Called with the description of the load that begins."""


class LoadRequest(Settings):
    """The loads to put on the endpoints: requests of each; None for none."""

    num_requests: Annotated[
        int | None,
        Field(ge=_LEAST_REQUESTS, le=100_000),
        Option(
            "Also put load on each images endpoint: N requests of one client, of eight, and of users.",
            "--requests --num-requests",
            metavar="N",
        ),
    ] = None

    def check_loads(self, plan: ProofPlan) -> None:
        """Raise UsageError for loads that cannot be measured, before anything is drawn."""
        sides = (plan.a, plan.b)
        if self.num_requests is not None and not any(isinstance(side, EndpointSide) for side in sides):
            raise UsageError("--requests: neither A nor B is an images endpoint (http://HOST:PORT/v1)")


@dataclass(frozen=True)
class SideLoad:
    side: Literal["A", "B"]
    row: LoadRow | None
    reason: str = ""


@dataclass(frozen=True)
class SpeedAnswer:
    """The answer, with median seconds an image, the tests of B's over A's, before B and drawn again after it, and the
    loads."""

    answer: ProofAnswer
    num_pairs: int = 0
    a_s: float | None = None
    b_s: float | None = None
    test: EquivalenceTest | None = None
    after: EquivalenceTest | None = None
    loads: tuple[SideLoad, ...] = ()


def speed(
    pairs: Sequence[PairFigures], untimed: str, a_again: Sequence[float | None] | None = None
) -> SpeedAnswer:
    """Return whether B's images take no longer than A's, also when A was drawn again after B; `untimed` is the reason
    for missing seconds."""
    if untimed:
        return SpeedAnswer(ProofAnswer(ProofVerdict.LEFT_OUT, untimed))
    timed = [
        (pair.prompt, a, b, again)
        for pair, again in zip(pairs, a_again or [None] * len(pairs), strict=True)
        if (a := pair.a.kept.seconds) is not None
        and (b := pair.b.kept.seconds) is not None
        and (a_again is None or again is not None)
    ]
    if not timed:
        reason = "no pair of images beyond the first, which is a warm-up"
        return SpeedAnswer(ProofAnswer(ProofVerdict.UNCLEAR, reason))
    prompts = [prompt for prompt, *_ in timed]
    before = _test([(a, b) for _, a, b, _ in timed], prompts)
    a_s, b_s = median(a for _, a, _, _ in timed), median(b for _, _, b, _ in timed)
    medians = f"median {seconds_in_words(b_s)} instead of {seconds_in_words(a_s)} an image"
    if a_again is None:
        reason = f"B takes {ratio_in_words(before)} A's time, {medians}; A was drawn before B, and --claim fast draws "
        answer = ProofAnswer(ProofVerdict.LEFT_OUT, f"{reason}it again after B")
        return SpeedAnswer(answer, len(timed), a_s, b_s, before)
    after = _test([(again or 0.0, b) for _, _, b, again in timed], prompts)
    num_untimed = len({pair.prompt for pair in pairs}) - before.num_groups
    answer = _answer(before, after, medians, num_untimed)
    return SpeedAnswer(answer, len(timed), a_s, b_s, before, after)


def ratio_in_words(test: EquivalenceTest) -> str:
    """Return B's time over A's with its 90 % interval, e.g. ×0.61 [×0.60, ×0.62]."""
    return difference_in_words(test, lambda change: f"×{math.exp(change):.2f}")


def seconds_in_words(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:#.3g} ms"
    return f"{seconds:#.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def _test(seconds: Sequence[tuple[float, float]], prompts: Sequence[str]) -> EquivalenceTest:
    changes = [math.log(max(b, _LEAST_S) / max(a, _LEAST_S)) for a, b in seconds]
    return equivalence(changes, prompts, MARGIN)


def _is_no_slower(test: EquivalenceTest) -> bool:
    # A side that is certainly not slower need not be shown to be no faster.
    is_surely = test.interval.high is not None and test.interval.high < MARGIN
    return is_surely or test.verdict in (Equivalence.WITHIN, Equivalence.BELOW)


def _answer(before: EquivalenceTest, after: EquivalenceTest, medians: str, num_untimed: int) -> ProofAnswer:
    """Return the answer for A as drawn before B and after it; `num_untimed` prompts have no image but a warm-up."""
    times = f"B takes {ratio_in_words(before)} A's time before it and {ratio_in_words(after)} A's after it, {medians}"
    drift = before.interval.point - after.interval.point
    needed = max((test.needed for test in (before, after) if test.needed is not None), default=0)
    is_slower = before.verdict is after.verdict is Equivalence.ABOVE
    changed = f"{times}; A's own time changed by ×{math.exp(drift):.2f}, so the machine is busy or throttles"
    would_tell = f"{times}; about {count(needed + num_untimed, 'prompt')} would tell"
    return decide(
        (is_slower, ProofVerdict.FAILED, times),
        (_is_no_slower(before) and _is_no_slower(after), ProofVerdict.PROVEN, times),
        (abs(drift) > MARGIN, ProofVerdict.UNCLEAR, changed),
        (not needed, ProofVerdict.UNCLEAR, f"{times}, too close to the margin of 5 %"),
        (True, ProofVerdict.UNCLEAR, would_tell),
    )


def measure_loads(
    plan: ProofPlan, store: ProofStore, request: LoadRequest, on_load: OnLoad = lambda text: None
) -> list[SideLoad]:
    """Return the loads on both sides. Stored loads are not measured again."""
    slo_s = _slo(plan, store)
    loads: list[SideLoad] = []
    for letter, name in _NAMES.items():
        side = plan.side(letter)
        if request.num_requests is not None and isinstance(side, EndpointSide):
            load = LoadPlan((_LEAST_REQUESTS,), (0.8,), request.num_requests, None, _SLO_FACTOR, slo_s)
            try:
                rows = _measure(plan, side, store.loads_file(letter), load, on_load)
                loads += [SideLoad(name, row) for row in rows]
            except VivaceError as error:
                loads.append(SideLoad(name, None, str(error)))
    return loads


def _measure(
    plan: ProofPlan, side: EndpointSide, path: Path, load: LoadPlan, on_load: OnLoad
) -> list[LoadRow]:
    fields = {name: value for name, value in side.fields.items() if name != "model"}
    fields |= {name: value for name, value in plan.settings.call.items() if name not in ("height", "width")}
    sizes = [f"{each.width}x{each.height}" for each in plan.settings_by_size if each.width and each.height]
    variants = tuple(Variant(size) for size in sizes) or (Variant(),)
    target = LoadTarget(side.server, side.fields.get("model"), fields, plan.prompts, variants).find_model()
    rows = [row for row in read_rows(path) if len(row.samples.outcome) == load.num_requests]

    def report(row: LoadRow) -> None:
        rows.append(row)
        write_rows(path, rows)

    begun: set[str] = set()

    def progress(stage: LoadStage, number: int, seconds: float) -> None:
        if stage.name not in begun:
            begun.add(stage.name)
            on_load(f"{side.text}: {stage.name}, {load.num_requests} requests")

    return measure(target, load, side.text, target.settings, list(rows), report, progress)


def _slo(plan: ProofPlan, store: ProofStore) -> float | None:
    images = [store.image("a", job) for job in plan.main_jobs]
    seconds = [image.seconds for image in images if image is not None and image.seconds is not None]
    return _SLO_FACTOR * median(seconds) if seconds and len(plan.settings_by_size) == 1 else None
