"""An answer as text of 80 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from vivace.advice.answer import Figures, Recommendation
from vivace.advice.limit import ChipLimit
from vivace.advice.words import elsewhere_of, figure_of, predicted_of, spread_of, where
from vivace.report.summary import plus_minus, ratio, seconds, size

WIDTH = 80
_LABEL = 12
_MOST = 3
_LABELS = {
    "memory": "too large",
    "quality": "left out",
    "unproven": "unproven",
    "hardware": "not here",
    "no figure": "no figure",
}
_SLOW_FIRST = 3  # times a later call


def text_of(answer: Recommendation) -> str:
    """Return the answer in plain words, one labelled paragraph for each thing to know."""
    lines = list(_head(answer))
    for label, said in _paragraphs(answer):
        lines += textwrap.wrap(
            said,
            WIDTH,
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
    for number, command in enumerate(answer.next):
        lines += _command(command, "next" if number == 0 else "")
    return "\n".join(lines)


def _command(command: str, label: str) -> Iterator[str]:
    """Yield a command line, broken before options where it is too long, so that it can still be copied."""
    line = f"{label:<{_LABEL}}"
    for part in re.split(r" (?=--)", command):
        if len(line) + len(part) > WIDTH - 3 and line.strip() != label:
            yield f"{line}\\"
            line = " " * (_LABEL + 4)
        line += f"{part} "
    yield line.rstrip()


def _head(answer: Recommendation) -> Iterator[str]:
    gpu = f" on {answer.gpu}" if answer.gpu is not None else ""
    if answer.gpu is None and answer.basis is not None:
        gpu = f" on {answer.basis.gpu} (no GPU was named)"
    limit = "" if answer.card_bytes is None else f" of {size(answer.card_bytes)}"
    if answer.wanted.max_bytes is not None:
        limit = f" within {size(answer.wanted.max_bytes)}"
    task = "" if answer.wanted.task == "text" else f", {answer.wanted.task}"
    yield f"{answer.model}{task}{gpu}{limit}, for {answer.wanted.goal}:"
    yield ""
    yield f"    {answer.recipe}" if answer.recipe is not None else "    no recipe: no record supports one"
    yield ""


def _paragraphs(answer: Recommendation) -> Iterator[tuple[str, str]]:
    chosen, basis, baseline = answer.chosen, answer.basis, answer.baseline
    if chosen is not None and basis is not None and baseline is not None:
        yield "gain", _gain(answer, chosen, baseline)
        yield "stands on", where(basis) + _measured(chosen)
        yield "memory", _memory(chosen, baseline, basis.device == "cpu")
        if answer.wanted.goal == "stability":
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
            yield "ties", _few(others)
        if answer.safe is not None:
            yield "safe", f"the best that keeps the picture: {elsewhere_of(answer.safe, answer)}"
    yield from _left_out(answer)
    if answer.other_model is not None:
        yield "fewer steps", _other_model(answer)
    for number, one in enumerate(answer.elsewhere):
        yield "" if number else "elsewhere", elsewhere_of(one, answer)
    if answer.limit is not None and answer.wanted.task in ("text", "edit"):
        yield "limit", _limit(answer.limit)
    if answer.missing:
        yield "missing", "; ".join(answer.missing)
    if answer.recipe is not None:
        yield "sure", f"{answer.sure}" + (f": {'; '.join(answer.doubts)}" if answer.doubts else "")


def _gain(answer: Recommendation, chosen: Figures, baseline: Figures) -> str:
    if answer.basis is not None and chosen.recipe == answer.basis.baseline and chosen.batch == baseline.batch:
        told = "none: nothing that is allowed is better than the baseline beyond the noise"
        return told + ("" if chosen.latency is None else f"; {plus_minus(chosen.latency)} an image")
    if answer.basis is not None and answer.basis.kind == "predicted":
        return _predicted(answer, chosen, baseline)
    told = ""
    if chosen.gain is not None:
        counted = " by the denoiser's operations, counted and not timed" if chosen.is_counted else ""
        told = f"{ratio(chosen.gain)} the speed of {baseline.recipe}{counted}"
    if chosen.predicted_from is not None:
        told += f"{': ' if told else ''}{predicted_of(chosen)}"
    elif chosen.latency is not None and baseline.latency is not None:
        told += f"{': ' if told else ''}{plus_minus(chosen.latency)} an image instead of {plus_minus(baseline.latency)}"
    elif chosen.latency is None:
        told += (
            f"; how long an image of {answer.model} takes at its own number of steps, the source does not say"
        )
    published = next(
        (one for one in answer.ranking if one.num_techniques == 0 and one.batch == chosen.batch), None
    )
    if published is not None and published.recipe != baseline.recipe and chosen.gain and published.gain:
        told += f"; {chosen.gain.point / published.gain.point:.2f}x the speed of the model as published"
    elif answer.over_published is not None:
        told += f"; {answer.over_published:.2f}x the speed of the model as published, by another record"
    if answer.wanted.goal == "throughput" and chosen.latency is not None:
        told += f", {1 / chosen.latency.point:.3g} images/s"
    if chosen.cost_per_1000 is not None:
        told += f"; {chosen.cost_per_1000:.3g} per 1,000 images at {answer.wanted.price_per_hour:g} an hour"
        if baseline.cost_per_1000 is not None:
            told += f" instead of {baseline.cost_per_1000:.3g}"
    if answer.basis is not None and not answer.basis.is_direct:
        told += f" (on {answer.basis.gpu}, not on {answer.gpu})"
    return told


def _predicted(answer: Recommendation, chosen: Figures, baseline: Figures) -> str:
    """Return what a recipe is predicted to take, with the range and what the model as published would take."""
    if chosen.latency is None:
        return "unknown"
    told = f"{predicted_of(chosen)}"
    if chosen.latency.low is not None and chosen.latency.high is not None:
        told += f" ({seconds(chosen.latency.low)} to {seconds(chosen.latency.high)})"
    if any(one.recipe == baseline.recipe and one.kind == "memory" for one in answer.left_out):
        return f"{told}; the model as published does not fit"
    return told


def _is_slow_at_first(chosen: Figures) -> bool:
    if chosen.first_call_s is None or chosen.latency is None:
        return False
    return chosen.first_call_s > _SLOW_FIRST * chosen.latency.point * chosen.batch


def _measured(chosen: Figures) -> str:
    parts = []
    if chosen.num_rounds is not None:
        parts.append(f"{chosen.num_rounds} process{'es' if chosen.num_rounds != 1 else ''}")
    if chosen.spread is not None and chosen.spread.num_calls is not None:
        parts.append(f"{chosen.spread.num_calls} calls")
    return f", {', '.join(parts)}" if parts else ""


def _memory(chosen: Figures, baseline: Figures, is_cpu: bool) -> str:
    if chosen.peak_bytes is None:
        return "peak unknown"
    told = f"peak {size(chosen.peak_bytes)}"
    if is_cpu:
        told += " (the process's resident set)"
    if baseline.peak_bytes is not None and baseline.recipe != chosen.recipe:
        change = round(100 * (chosen.peak_bytes / baseline.peak_bytes - 1))
        told += f" instead of {size(baseline.peak_bytes)} ({change:+d} %)" if change else ", as the baseline"
    return told


def _left_out(answer: Recommendation) -> Iterator[tuple[str, str]]:
    """Tell what was left out: all that is not known to fit, and otherwise what would have been better."""
    unknown = [one.title for one in answer.left_out if one.kind == "memory unknown"]
    if unknown:
        yield "unknown", f"not known to fit: {_few(unknown)}"
    if answer.chosen is None:
        for kind in ("memory", "quality", "unproven", "no figure"):
            if rest := [one for one in answer.left_out if one.kind == kind]:
                example = rest[-1] if kind == "memory" else rest[0]
                yield _LABELS[kind], f"{len(rest)}, e.g. {example.title}: {example.why}"
        return
    best = answer.chosen.score.point
    for kind in ("memory", "quality", "unproven", "hardware"):
        found = [one for one in answer.left_out if one.kind == kind and (one.score or 0) > best]
        by_reason: dict[str, list[str]] = {}
        for one in found[:_MOST]:
            by_reason.setdefault(one.why, []).append(one.title)
        told = [f"{', '.join(recipes)}: {why}" for why, recipes in by_reason.items()]
        if len(found) > _MOST:
            told.append(f"and {len(found) - _MOST} more")
        if told:
            yield _LABELS[kind], f"better, but {'; '.join(told)}"
    if rest := [one for one in answer.left_out if one.kind == "no figure"]:
        more = f"; and {len(rest) - 1} more" if len(rest) > 1 else ""
        yield "no figure", f"{rest[0].title}: {rest[0].why}{more}"


def _limit(limit: ChipLimit) -> str:
    return (
        f"{limit.steps} computed step{'s' if limit.steps != 1 else ''} of {limit.step_flop / 1e12:.3g} TFLOP take at "
        f"least {seconds(limit.half_s)} in 16 bits and {seconds(limit.eight_s)} in 8 by the data sheet of {limit.gpu}"
    )


def _other_model(answer: Recommendation) -> str:
    one = answer.other_model
    assert one is not None
    steps = "" if one.steps is None else f" of {one.steps} step{'s' if one.steps != 1 else ''}"
    return (
        f"{one.model}, another model{steps}, takes {seconds(one.latency_s)} an image with {one.recipe}, where "
        f"{answer.model} takes {seconds(one.instead_of_s)} ({one.place}, {one.gpu}); its images are its own"
    )


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST])
    return shown if len(names) <= _MOST else f"{shown}, and {len(names) - _MOST} more"
