"""A recommendation as an answer: the recipe, and a line for each thing to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vivace.answers.answer import Answer, Fact, Facts
from vivace.answers.formatting import few, plus_minus, ratio, seconds, size
from vivace.evidence.recommendation.sentences import (
    elsewhere_of,
    figure_of,
    predicted_of,
    spread_of,
    time_of,
    where,
)
from vivace.evidence.recommendation.speed_limit import ChipLimit

if TYPE_CHECKING:
    from vivace.evidence.recommendation.recommendation import RecipeFigures, Recommendation

_BRIEF = ("gain", "stands on", "memory", "spread", "quality", "sure")
"""What a short answer says."""
_MOST = 3
_LABELS = {
    "memory": "too large",
    "quality": "left out",
    "unproven": "unproven",
    "hardware": "not here",
    "no figure": "no figure",
}
_SLOW_FIRST = 3  # times a later call


def answer_of(answer: Recommendation) -> Answer:
    """Return the answer of a recommendation; what its short form leaves out is marked."""
    facts = [Fact(label, text, is_detail=label not in _BRIEF) for label, text in _paragraphs(answer)]
    return Answer(
        command="recommend",
        headline=answer.recipe if answer.recipe is not None else "no recipe: no record supports one",
        is_code=answer.recipe is not None,
        data=answer.to_json(),
        verdict=answer.sure,
        about=(_question(answer),),
        facts=Facts(tuple(facts)),
        commands=tuple(Fact("next", command, is_command=True) for command in answer.next),
    )


def _question(answer: Recommendation) -> str:
    gpu = f" on {answer.gpu}" if answer.gpu is not None else ""
    if answer.gpu is None and answer.basis is not None:
        gpu = f" on {answer.basis.gpu} (no GPU was named)"
    limit = "" if answer.card_bytes is None else f" of {size(answer.card_bytes)}"
    if answer.criteria.max_bytes is not None:
        limit = f" within {size(answer.criteria.max_bytes)}"
    task = "" if answer.criteria.task == "text" else f", {answer.criteria.task}"
    return f"{answer.model}{task}{gpu}{limit}, for {answer.criteria.goal}:"


def _paragraphs(answer: Recommendation) -> Iterator[tuple[str, str]]:
    chosen, basis, baseline = answer.chosen, answer.basis, answer.baseline
    if chosen is not None and basis is not None and baseline is not None:
        yield "gain", _gain(answer, chosen, baseline)
        yield "stands on", where(basis) + _measured(chosen)
        yield "memory", _memory(chosen, baseline, basis.device == "cpu")
        if answer.criteria.goal == "stability":
            yield "spread", spread_of(chosen)
        yield "quality", answer.quality
        if _is_slow_at_first(chosen):
            compiling = ", compilation included" if "compile" in chosen.recipe else ""
            yield "first call", f"{seconds(chosen.first_call_s or 0)}{compiling}"
        if answer.runner_up is not None:
            yield (
                "runner-up",
                f"{answer.runner_up.title}: {figure_of(answer.runner_up, answer)}; {answer.why}",
            )
        others = [
            title for title in answer.ties if answer.runner_up is None or title != answer.runner_up.title
        ]
        if others:
            yield "ties", few(others, _MOST)
        if answer.safe is not None:
            yield "safe", f"the best that keeps the image: {elsewhere_of(answer.safe, answer)}"
    yield from _left_out(answer)
    if answer.other_model is not None:
        yield "fewer steps", _other_model(answer)
    for other in answer.elsewhere:
        yield "elsewhere", elsewhere_of(other, answer)
    if answer.limit is not None and answer.criteria.task in ("text", "edit"):
        yield "limit", _limit(answer.limit)
    if answer.missing:
        yield "missing", "; ".join(answer.missing)
    if answer.recipe is not None:
        yield "sure", f"{answer.sure}" + (f": {'; '.join(answer.doubts)}" if answer.doubts else "")


def _gain(answer: Recommendation, chosen: RecipeFigures, baseline: RecipeFigures) -> str:
    if answer.basis is not None and chosen.recipe == answer.basis.baseline and chosen.batch == baseline.batch:
        text = "none: nothing that is allowed is better than the baseline beyond the noise"
        return text + ("" if chosen.latency is None else f"; {time_of(chosen)} an image")
    if answer.basis is not None and answer.basis.kind == "predicted":
        return _predicted(answer, chosen, baseline)
    text = ""
    if chosen.gain is not None:
        counted = " by the denoiser's operations, counted and not timed" if chosen.is_counted else ""
        text = f"{ratio(chosen.gain)} the speed of {baseline.recipe}{counted}"
    if chosen.predicted_from is not None:
        text += f"{': ' if text else ''}{predicted_of(chosen)}"
    elif chosen.latency is not None and baseline.latency is not None:
        text += f"{': ' if text else ''}{plus_minus(chosen.latency)} an image instead of {plus_minus(baseline.latency)}"
    elif chosen.latency is None:
        text += (
            f"; how long an image of {answer.model} takes at its own number of steps, the source does not say"
        )
    published = next(
        (
            figures
            for figures in answer.ranking
            if figures.num_techniques == 0 and figures.batch == chosen.batch
        ),
        None,
    )
    if published is not None and published.recipe != baseline.recipe and chosen.gain and published.gain:
        text += f"; {chosen.gain.point / published.gain.point:.2f}x the speed of the model as published"
    elif answer.over_published is not None:
        text += f"; {answer.over_published:.2f}x the speed of the model as published, by another record"
    if answer.criteria.goal == "throughput" and chosen.latency is not None:
        text += f", {1 / chosen.latency.point:.3g} images/s"
    if chosen.cost_per_1000 is not None:
        text += f"; {chosen.cost_per_1000:.3g} per 1,000 images at {answer.criteria.price_per_hour:g} an hour"
        if baseline.cost_per_1000 is not None:
            text += f" instead of {baseline.cost_per_1000:.3g}"
    if answer.basis is not None and not answer.basis.is_direct:
        text += f" (on {answer.basis.gpu}, not on {answer.gpu})"
    return text


def _predicted(answer: Recommendation, chosen: RecipeFigures, baseline: RecipeFigures) -> str:
    """Return a recipe's predicted time with its range, and the published model's."""
    if chosen.latency is None:
        return "unknown"
    text = f"{predicted_of(chosen)}"
    if chosen.latency.low is not None and chosen.latency.high is not None:
        text += f" ({seconds(chosen.latency.low)} to {seconds(chosen.latency.high)})"
    if any(
        candidate.recipe == baseline.recipe and candidate.kind == "memory" for candidate in answer.left_out
    ):
        return f"{text}; the model as published does not fit"
    return text


def _is_slow_at_first(chosen: RecipeFigures) -> bool:
    if chosen.first_call_s is None or chosen.latency is None:
        return False
    return chosen.first_call_s > _SLOW_FIRST * chosen.latency.point * chosen.batch


def _measured(chosen: RecipeFigures) -> str:
    parts = []
    if chosen.num_rounds is not None:
        parts.append(f"{chosen.num_rounds} process{'es' if chosen.num_rounds != 1 else ''}")
    if chosen.spread is not None and chosen.spread.num_calls is not None:
        parts.append(f"{chosen.spread.num_calls} calls")
    return f", {', '.join(parts)}" if parts else ""


def _memory(chosen: RecipeFigures, baseline: RecipeFigures, is_cpu: bool) -> str:
    if chosen.peak_bytes is None:
        return "peak unknown"
    text = f"peak {size(chosen.peak_bytes)}"
    if is_cpu:
        text += " (the process's resident set)"
    if baseline.peak_bytes is not None and baseline.recipe != chosen.recipe:
        change = round(100 * (chosen.peak_bytes / baseline.peak_bytes - 1))
        text += f" instead of {size(baseline.peak_bytes)} ({change:+d} %)" if change else ", as the baseline"
    return text


def _left_out(answer: Recommendation) -> Iterator[tuple[str, str]]:
    """Report the recipes left out: all without known memory, and otherwise those that would have been better."""
    unknown = [candidate.title for candidate in answer.left_out if candidate.kind == "memory unknown"]
    if unknown:
        yield "unknown", f"not known to fit: {few(unknown, _MOST)}"
    if answer.chosen is None:
        for kind in ("memory", "quality", "unproven", "no figure"):
            if rest := [candidate for candidate in answer.left_out if candidate.kind == kind]:
                example = rest[-1] if kind == "memory" else rest[0]
                yield _LABELS[kind], f"{len(rest)}, e.g. {example.title}: {example.why}"
        return
    best = answer.chosen.score.point
    for kind in ("memory", "quality", "unproven", "hardware"):
        reasons = [
            candidate
            for candidate in answer.left_out
            if candidate.kind == kind and (candidate.score or 0) > best
        ]
        by_reason: dict[str, list[str]] = {}
        for candidate in reasons[:_MOST]:
            by_reason.setdefault(candidate.why, []).append(candidate.title)
        lines = [f"{', '.join(recipes)}: {why}" for why, recipes in by_reason.items()]
        if len(reasons) > _MOST:
            lines.append(f"and {len(reasons) - _MOST} more")
        if lines:
            yield _LABELS[kind], f"better, but {'; '.join(lines)}"
    if rest := [candidate for candidate in answer.left_out if candidate.kind == "no figure"]:
        more = f"; and {len(rest) - 1} more" if len(rest) > 1 else ""
        yield "no figure", f"{rest[0].title}: {rest[0].why}{more}"


def _limit(limit: ChipLimit) -> str:
    return (
        f"{limit.steps} computed step{'s' if limit.steps != 1 else ''} of {limit.step_flop / 1e12:.3g} TFLOP take at "
        f"least {seconds(limit.half_s)} in 16 bits and {seconds(limit.eight_s)} in 8 by the data sheet of {limit.gpu}"
    )


def _other_model(answer: Recommendation) -> str:
    other = answer.other_model
    assert other is not None
    steps = "" if other.steps is None else f" of {other.steps} step{'s' if other.steps != 1 else ''}"
    return (
        f"{other.model}, another model{steps}, takes {seconds(other.latency_s)} an image with {other.recipe}, where "
        f"{answer.model} takes {seconds(other.instead_of_s)} ({other.place}, {other.gpu}); its images are its own"
    )
