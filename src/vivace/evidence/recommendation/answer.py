"""A recommendation in words: eight lines of what a person asks first, and everything else behind `--why`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vivace.answers.answer import Answer, Fact, Facts, Section
from vivace.answers.formatting import between_s, count, few, plus_minus, ratio, seconds, size
from vivace.architectures import CATALOGUE
from vivace.evidence.measured import DISTURBED_BY
from vivace.evidence.recommendation.kin import Download, download_of
from vivace.evidence.standing import only_compiled
from vivace.foundation.hardware import Gpu, capability_of, known_gpu
from vivace.foundation.spec.recipe_syntax import BASELINE, BEST
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.stats import ONE_ROUND_MARGIN, Gate, Interval
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve_cached
from vivace.runtime.memory.fit import CARDS_GB, RESERVE_BYTES

if TYPE_CHECKING:
    from vivace.evidence.recommendation.recommendation import (
        Basis,
        Elsewhere,
        RecipeFigures,
        Recommendation,
        Sure,
    )

Fits = Literal["as published", "with the recipe", "no", "unknown"]
_FITS: dict[Fits, str] = {
    "as published": ": fits",
    "with the recipe": ": fits with this recipe",
    "no": ": does not fit",
    "unknown": "",
}
_ROOM = 70
"""Characters of a line's value: each of the eight is one line of a terminal with 80."""
_NAME_ROOM = 30
_MOST = 3
_SLOW_FIRST = 3  # times a later call
_LABELS = {
    "memory unknown": "unknown",
    "memory": "too large",
    "quality": "left out",
    "unproven": "unproven",
    "hardware": "not here",
    "no figure": "no figure",
}
_PROMPTS = {"tinyworld": "a red circle above a blue square", "edit": "make it winter"}
_INPUTS = {
    "image": ("--image", "photo.png"),
    "edit": ("--image", "photo.png"),
    "inpaint": ("--image", "photo.png", "--mask", "mask.png"),
    "control": ("--control", "edges.png"),
}


@dataclass(frozen=True)
class Brief:
    """What a person asks first of a model on a card. Figures are None, and texts "", where they are unknown.

    Attributes:
        known: how the time is known: "measured here", "measured by vivace", "measured by others", "predicted".
    """

    model: str
    card: str
    fits: Fits
    recipe: str | None
    latency: Interval | None
    known: str
    peak_bytes: float | None
    published_bytes: float | None
    images: str
    command: str
    download: Download
    origin: str = ""
    confidence: str = ""
    note: str = ""
    next: str = ""

    def answer(
        self,
        command: str,
        data: dict[str, Any],
        facts: Sequence[Fact] = (),
        sections: Sequence[Section] = (),
        commands: Sequence[Fact] = (),
    ) -> Answer:
        verdict = _FITS[self.fits] + (" as published" if self.fits == "no" and self.recipe is None else "")
        return Answer(
            command=command,
            headline=f"{_shortened(self.model)}{self.card}{verdict}",
            data=data | {"brief": asdict(self)},
            verdict=self.fits,
            facts=Facts((*self._facts(), *facts)),
            sections=tuple(sections),
            commands=tuple(commands),
        )

    def _facts(self) -> Iterator[Fact]:
        yield Fact("time", self._time())
        peak = "" if self.peak_bytes is None else size(self.peak_bytes)
        published = ""
        if self.published_bytes is not None and (self.recipe != BASELINE or not peak):
            published = f"{size(self.published_bytes)} as published"
        note = f"{size(RESERVE_BYTES)} must stay free" if self.fits == "no" else self.note
        yield Fact("memory", _line(peak, published, note) or "not known")
        yield Fact("images", self.images or "nothing is known of them")
        recipe = self._recipe()
        yield Fact("recipe", recipe, where_short=_line(recipe, "--why says more").removeprefix(recipe))
        if self.command:
            yield Fact("draw", self.command, is_command=True, is_whole=True)
        else:
            yield Fact("next", self.next, is_command=True, is_whole=True)
        yield Fact("download", _download(self.download))

    def _time(self) -> str:
        sure = f"{self.confidence} confidence" if self.confidence not in ("", "none") else ""
        if self.latency is None:
            return _line(self.known or "not known", sure)
        about = "about " if self.known == "predicted" else ""
        return _line(
            f"{about}{seconds(self.latency.point)} an image, {self.known}", sure, *self.origin.split("; ")
        )

    def _recipe(self) -> str:
        if self.recipe is None:
            return "none is known to fit" if self.fits == "no" else f"{BEST} takes what is safe on any model"
        techniques = list(resolve_cached(self.recipe))
        if not techniques:
            better = "nothing known is faster" if self.confidence else ""
            return _line("baseline, the model as published", better)
        texts = [technique.text.partition("@")[0] for technique in techniques]
        names = [technique.name for technique in techniques]
        return next(
            (line for line in (", ".join(texts), ", ".join(names)) if len(line) <= _ROOM), few(names, 4)
        )


def _line(*parts: str) -> str:
    """Join the first parts that fit in a line; the first is there in any case."""
    line = ""
    for part in parts:
        joined = f"{line}; {part}" if line and part else line or part
        line = joined if not line or len(joined) <= _ROOM else line
    return line


def _shortened(model: str) -> str:
    name = Path(model).name if Path(model).is_absolute() or Path(model).exists() else model
    return name if len(name) <= _NAME_ROOM else f"{name[: _NAME_ROOM - 11]}…{name[-10:]}"


def _download(download: Download) -> str:
    if not download.repo:
        return "nothing"
    bytes_ = "" if download.num_bytes is None else size(download.num_bytes)
    place = f"; ask for access at {download.repo} first" if download.is_gated else f" from {download.repo}"
    wordings = [
        ", ".join(filter(None, (bytes_, download.part))),
        bytes_ or download.part or "its size is not known",
    ]
    return next(
        (text for what in wordings if len(text := what + place) <= _ROOM and what), wordings[-1] + place
    )


def how_known(figures: RecipeFigures, basis: Basis) -> tuple[str, str]:
    if figures.is_counted:
        return "counted, not timed", ""
    if figures.predicted_from is not None:
        latency, there = figures.latency, known_gpu(figures.predicted_from)
        ends = None if latency is None else between_s(latency)
        if figures.measured_s is None:
            return "predicted", ends or ""
        name = figures.predicted_from if there is None else there.chip.name
        return "predicted", "; ".join(filter(None, (ends, f"from {seconds(figures.measured_s)} on {name}")))
    who = {"own": "here", "committed": "by vivace", "predicted": "by vivace"}
    return f"measured {who.get(basis.kind, 'by others')}", ""


def images_of(keeps: bool, judged: Gate | None, small_model: str = "") -> str:
    """Return what happens to the images, for people."""
    word = "kept" if keeps else "changed"
    verdicts = {Gate.PASSED: "they pass the quality gate", Gate.FAILED: "they fail the quality gate"}
    if judged in verdicts:
        what = f"{judged} on {small_model}, a small model of the kind" if small_model else verdicts[judged]
        return f"{word}: {what}"
    return (
        f"{word}: only the order and rounding of arithmetic change; not judged"
        if keeps
        else f"{word}, not judged"
    )


def card_in_words(gpu: str | None, card_bytes: float | None, max_bytes: float | None = None) -> str:
    """Return " on RTX 4090 (24 GB)"."""
    within = "" if max_bytes is None else f" within {max_bytes / 1e9:g} GB"
    if gpu is None:
        return within
    if gpu.lower() == "cpu":
        return " on a CPU"
    known = known_gpu(gpu)
    memory = "" if card_bytes is None else f" ({card_bytes / 1e9:.4g} GB)"
    return f" on {gpu if known is None else known.chip.name}{memory}{within}"


def cards_for(needed_bytes: float) -> str:
    enough = [gb for gb in CARDS_GB if needed_bytes + RESERVE_BYTES <= gb * 1e9]
    return f"for cards of {enough[0]} GB and more" if enough else "more than usual cards have"


def draw_command(model: str, recipe: str, task: str = "text", more: Sequence[str] = ()) -> str:
    entry = CATALOGUE.get(model.lower().removeprefix(SYNTHETIC))
    prompt = _PROMPTS.get(
        "edit" if task == "edit" else "" if entry is None else entry.prompt_set, "a red fox in snow"
    )
    words = ["--model", model, "--recipe", recipe, *_INPUTS.get(task, ()), *more]
    return f'vivace generate "{prompt}" {shlex.join(words)}'


def brief_of(answer: Recommendation) -> Brief:
    criteria, chosen, basis = answer.criteria, answer.chosen, answer.basis
    model, gpu, images, known = criteria.model.strip(), answer.gpu, "", ("", "")
    fits = _fits(answer)
    if chosen is not None and basis is not None:
        judged = chosen.judged
        known = how_known(chosen, basis)
        if chosen.latency is None and chosen.gain is not None:
            known = f"{chosen.gain.point:.2f}x the speed of {basis.baseline}, {known[0]}", ""
        gate, of = (None, "") if judged is None else (judged.gate, judged.of)
        images = "as published" if chosen.recipe == BASELINE else images_of(chosen.same_picture, gate, of)
        if gpu is None:
            known = f"{known[0]} on {basis.gpu}", "--gpu names yours"
    chip, note = _with_several_sizes(answer), ""
    if chip is not None:
        note = f"it is sold with {chip.chip.sizes} GB: name yours"
    elif gpu is None and criteria.max_bytes is None and answer.published_bytes is not None:
        note = cards_for(answer.published_bytes)
    return Brief(
        model=model,
        card=card_in_words(gpu, answer.card_bytes, criteria.max_bytes),
        fits=fits,
        recipe=answer.recipe,
        latency=None if chosen is None else chosen.latency,
        known=known[0],
        origin=known[1],
        confidence=answer.sure,
        peak_bytes=None if chosen is None else chosen.peak_bytes,
        published_bytes=answer.published_bytes,
        images=images,
        command="" if fits == "no" else draw_command(model, _word(answer), criteria.task),
        next=answer.next[0] if answer.next else "",
        download=download_of(model),
        note=note,
    )


def _fits(answer: Recommendation) -> Fits:
    chosen, card, published = answer.chosen, answer.card_bytes, answer.published_bytes
    if (answer.gpu or "").lower() == "cpu" or (card is None and answer.criteria.max_bytes is None):
        return "unknown"
    most = answer.most_bytes
    assert most is not None
    if published is not None and published <= most and (chosen is None or (chosen.peak_bytes or 0) <= most):
        return "as published"
    if chosen is None:
        return "no" if published is not None else "unknown"
    return "unknown" if chosen.peak_bytes is None else "with the recipe"


def _word(answer: Recommendation) -> str:
    """Return the recipe to type: `best`, with what it needs to be the recipe of the answer, or the recipe itself."""
    criteria, chosen, basis = answer.criteria, answer.chosen, answer.basis
    if chosen is None or basis is None:
        return BEST
    is_other_store = basis.kind == "own" and Path(basis.place) != Path(DEFAULT_STORE)
    if criteria.goal != "latency" or criteria.limits is not None or is_other_store:
        return chosen.recipe
    arguments = [] if criteria.max_bytes is None else [f"{criteria.max_bytes / 1e9:g}GB"]
    arguments += [] if chosen.same_picture else ["changes=True"]
    return f"{BEST}({', '.join(arguments)})" if arguments else BEST


def answer_of(answer: Recommendation) -> Answer:
    """Return the answer of a recommendation; what its short form leaves out is marked."""
    facts = [Fact(label, text, is_detail=True) for label, text in _details(answer)]
    disturbance = disturbance_of(answer)
    commands = [
        Fact("measure", line, is_command=True, is_detail=bool(i) or not disturbance)
        for i, line in enumerate(answer.next)
    ]
    made = brief_of(answer).answer("recommend", answer.to_json(), facts, commands=commands)
    return replace(made, notes=(disturbance,)) if disturbance else made


def _details(answer: Recommendation) -> Iterator[tuple[str, str]]:
    chosen, basis, baseline, other = answer.chosen, answer.basis, answer.baseline, answer.runner_up
    if chosen is not None and basis is not None and baseline is not None:
        yield "in full", chosen.title
        yield "goal", f"{answer.criteria.goal}: {_gain(answer, chosen, baseline)}"
        number = chosen.num_rounds
        processes = "" if number is None else f", {number} process{'' if number == 1 else 'es'}"
        calls = chosen.spread.num_calls if chosen.spread is not None else None
        yield "stands on", where(basis) + processes + ("" if calls is None else f", {calls} calls")
        if answer.criteria.goal == "stability":
            yield "spread", _spread(chosen)
        yield "quality", answer.quality
        later_s = 0.0 if chosen.latency is None else chosen.latency.point * chosen.batch
        if later_s and (chosen.first_call_s or 0) > _SLOW_FIRST * later_s:
            compiling = ", compilation included" if "compile" in chosen.recipe else ""
            yield "first call", f"{seconds(chosen.first_call_s or 0)}{compiling}"
        if other is not None:
            yield "runner-up", f"{other.title}: {_figure(other, answer)}; {answer.why}"
        if others := [title for title in answer.ties if other is None or title != other.title]:
            yield "ties", few(others, _MOST)
        if answer.safe is not None:
            yield "safe", f"the best that keeps the image: {_elsewhere(answer.safe, answer)}"
    yield from _left_out(answer)
    if (model := answer.other_model) is not None:
        steps = "" if model.steps is None else f" of {count(model.steps, 'step')}"
        yield (
            "fewer steps",
            f"{model.model}, another model{steps}, takes {seconds(model.latency_s)} an image with {model.recipe} "
            f"instead of {seconds(model.instead_of_s)} ({model.place}, {model.gpu}); its images are its own",
        )
    for source in answer.elsewhere:
        yield "elsewhere", _elsewhere(source, answer)
    if (limit := answer.limit) is not None and answer.criteria.task in ("text", "edit"):
        yield (
            "limit",
            f"{count(limit.steps, 'computed step')} of {limit.step_flop / 1e12:.3g} TFLOP take at "
            f"least {seconds(limit.half_s)} in 16 bits and {seconds(limit.eight_s)} in 8 by the data sheet of "
            f"{limit.gpu}",
        )
    if answer.missing:
        yield "missing", "; ".join(answer.missing)
    if answer.recipe is not None:
        yield "confidence", f"{answer.sure}" + (f": {'; '.join(answer.doubts)}" if answer.doubts else "")


def _gain(answer: Recommendation, chosen: RecipeFigures, baseline: RecipeFigures) -> str:
    basis, goal = answer.basis, answer.criteria.goal
    assert basis is not None
    parts = []
    published = next(
        (each for each in answer.ranking if each.num_techniques == 0 and each.batch == chosen.batch), None
    )
    is_baseline = chosen.recipe == basis.baseline and chosen.batch == baseline.batch
    if is_baseline:
        parts.append("nothing that is allowed is better than the baseline beyond the noise")
    elif chosen.gain is not None and basis.kind != "predicted":
        counted = ", by the denoiser's operations, counted and not timed" if chosen.is_counted else ""
        parts.append(f"{ratio(chosen.gain)} the speed of {baseline.recipe}{counted}")
    parts.append(
        time_of(chosen) + " an image" if chosen.latency is not None else "seconds of an image are not known"
    )
    if not is_baseline and basis.kind != "predicted" and None not in (chosen.latency, baseline.latency):
        parts[-1] += f" instead of {time_of(baseline)}"
    if published is not None and published.recipe != baseline.recipe and chosen.gain and published.gain:
        parts.append(f"{chosen.gain.point / published.gain.point:.2f}x the speed of the model as published")
    elif answer.over_published is not None:
        parts.append(f"{answer.over_published:.2f}x the speed of the model as published, by another record")
    if goal == "throughput" and chosen.latency is not None:
        parts.append(f"{1 / chosen.latency.point:.3g} images/s")
    if goal == "memory" and baseline.peak_bytes is not None and chosen.peak_bytes is not None:
        parts.append(f"peak {size(chosen.peak_bytes)} instead of {size(baseline.peak_bytes)}")
    if chosen.cost_per_1000 is not None:
        than = "" if baseline.cost_per_1000 is None else f" instead of {baseline.cost_per_1000:.3g}"
        parts.append(
            f"{chosen.cost_per_1000:.3g} per 1,000 images{than} at {answer.criteria.price_per_hour:g} an hour"
        )
    if not basis.is_direct:
        parts.append(f"on {basis.gpu}, not on {answer.gpu}")
    return "; ".join(parts)


def _left_out(answer: Recommendation) -> Iterator[tuple[str, str]]:
    """Report the recipes left out: all without known memory or figure, and otherwise those that would be better."""
    best = None if answer.chosen is None else answer.chosen.score.point
    for kind, label in _LABELS.items():
        rest = [candidate for candidate in answer.left_out if candidate.kind == kind]
        if kind in ("memory unknown", "no figure"):
            if rest:
                what = "not known to fit: " if kind == "memory unknown" else ""
                yield label, f"{what}{few([candidate.title for candidate in rest], _MOST)}: {rest[0].why}"
        elif best is None:
            if rest:
                example = rest[-1] if kind == "memory" else rest[0]
                yield label, f"{len(rest)}, e.g. {example.title}: {example.why}"
        elif better := [candidate for candidate in rest if (candidate.score or 0) > best]:
            by_reason: dict[str, list[str]] = {}
            for candidate in better[:_MOST]:
                by_reason.setdefault(candidate.why, []).append(candidate.title)
            lines = [f"{', '.join(recipes)}: {why}" for why, recipes in by_reason.items()]
            if len(better) > _MOST:
                lines.append(f"and {len(better) - _MOST} more")
            yield label, f"better, but {'; '.join(lines)}"


def _figure(figures: RecipeFigures, answer: Recommendation, over: str = "") -> str:
    """Return a recipe's figure for the goal: "1.83x [1.70, 1.97] over baseline, 2.74 s ±1 %"."""
    goal, basis = answer.criteria.goal, answer.basis
    if goal == "memory":
        peak = "peak memory unknown" if figures.peak_bytes is None else size(figures.peak_bytes)
        return peak + ("" if figures.gain is None else f" at {figures.gain.point:.2f}x the speed")
    if goal == "stability":
        return _spread(figures)
    is_plain = basis is not None and figures.recipe == basis.baseline and figures.batch == basis.batch
    parts = []
    if figures.gain is not None and not is_plain and not figures.is_estimated:
        parts.append(ratio(figures.gain) + (f" over {over}" if over else ""))
    if figures.latency is not None or figures.predicted_from is not None:
        parts.append(time_of(figures))
    if goal == "throughput" and figures.latency is not None:
        parts.append(f"{1 / figures.latency.point:.3g} images/s")
    if goal == "cost" and figures.cost_per_1000 is not None:
        parts.append(f"{figures.cost_per_1000:.3g} per 1,000 images")
    return ", ".join(parts)


def time_of(figures: RecipeFigures) -> str:
    if figures.predicted_from is None and figures.latency is not None:
        return plus_minus(figures.latency)
    parts = []
    if (latency := figures.latency) is not None:
        ends = between_s(latency)
        parts.append(f"about {seconds(latency.point)}{f' ({ends})' if ends else ''} predicted")
    if figures.measured_s is not None:
        parts.append(f"{seconds(figures.measured_s)} measured on {figures.predicted_from}")
    return ", ".join(parts) or "time unknown"


def _spread(figures: RecipeFigures) -> str:
    spread = figures.spread
    calls = "" if spread is None or spread.num_calls is None else f" of {spread.num_calls} calls"
    text = "its spread is not known"
    if spread is not None and spread.p99_s is not None:
        text = f"p99 {seconds(spread.p99_s)}, {spread.p99_s / spread.p50_s:.3f} of the median{calls}"
    elif spread is not None and spread.max_s is not None:
        text = f"longest {spread.max_s / spread.min_s:.3f} of the shortest{calls}"
    width = None if spread is None or figures.latency is None else figures.latency.half_width
    return text if width is None else f"{text}, median ±{100 * width:.1f} %"


def where(basis: Basis) -> str:
    """Return the place of a table in words: its owner, place, device, and workload."""
    whose = {
        "own": f"your records in {basis.place}",
        "committed": f"vivace's record {basis.place}",
        "community": f"{basis.place}, reported by others",
        "published": f"{basis.place}, published by others",
        "predicted": f"{basis.place} from data sheets, and records of other GPUs",
    }[basis.kind]
    parts = [f"{basis.of}, whose architecture it has" if basis.of else basis.model, basis.gpu]
    parts += [f"{basis.width}x{basis.height}"] if basis.height and basis.width else []
    parts += [count(basis.steps, "step")] if basis.steps else []
    parts += [f"batch {basis.batch}"] if basis.batch != 1 else []
    parts += ["random weights"] if basis.random_weights else []
    return f"{whose}: {', '.join(parts)}"


def _elsewhere(elsewhere: Elsewhere, answer: Recommendation) -> str:
    """Return another source's advice, marked where it is about another model or GPU."""
    differs = {"model": elsewhere.basis.model != answer.model, "GPU": not elsewhere.basis.is_direct}
    other = [word for word, is_other in differs.items() if is_other]
    marked = f"another {' and '.join(other)}; " if other else ""
    figure = _figure(elsewhere.best, answer, elsewhere.basis.baseline)
    return f"{marked}{where(elsewhere.basis)}: {elsewhere.best.title} {figure}"


def quality_of(answer: Recommendation) -> str:
    chosen, basis = answer.chosen, answer.basis
    assert chosen is not None
    assert basis is not None
    if chosen.recipe == basis.baseline:
        return "it is the baseline that the others are compared with"
    if (judged := chosen.judged) is not None:
        words = {Gate.PASSED: "passes the quality gate", Gate.FAILED: "fails the quality gate"}
        verdict = words.get(judged.gate or Gate.UNCLEAR, "not proven")
        if judged.of:
            return (
                f"judged on {judged.of}, a small model of the same kind, not on {basis.model}: {verdict} "
                f"({judged.reason})"
            )
        return f"{verdict}: {judged.reason}"
    open_ = (
        "the source publishes no figure of its images"
        if basis.kind == "published"
        else "no images were judged"
    )
    if not chosen.same_picture:
        return open_
    if basis.random_weights:
        open_ = "not judged on this model"
    return f"over {basis.baseline} it only reorders or rounds arithmetic, which is declared to keep the image; {open_}"


def why_lost(answer: Recommendation) -> str:
    """Return why the runner-up lost; "" without one."""
    chosen, other, goal = answer.chosen, answer.runner_up, answer.criteria.goal
    if chosen is None or other is None:
        return ""
    if answer.is_tie:
        simpler = "faster" if goal in ("memory", "stability") else "as simple, and ahead by its figure"
        if chosen.num_techniques < other.num_techniques:
            number = count(chosen.num_techniques, "technique")
            simpler = f"simpler ({number} instead of {other.num_techniques})"
        elif chosen.same_picture and not other.same_picture:
            simpler = "the one that keeps the image"
        return f"a tie: the difference is within the noise; the chosen one is {simpler}"
    share = chosen.score.point / other.score.point
    if chosen.is_counted and goal != "memory":
        return f"computes {share:.2f} times as much"
    return {
        "memory": f"needs {share:.2f} times the memory",
        "stability": f"its calls differ more, {share:.3f} times",
    }.get(goal, f"takes {share:.2f} times as long an image")


def assess(answer: Recommendation) -> tuple[Sure, tuple[str, ...]]:
    """Return how sure an answer is, with the objections to it."""
    basis, chosen, card = answer.basis, answer.chosen, answer.card_bytes
    assert basis is not None
    assert chosen is not None
    is_changed = not chosen.same_picture and chosen.recipe != basis.baseline
    gate = None if chosen.judged is None else chosen.judged.gate
    is_own = basis.kind == "own" and not basis.random_weights and chosen.recipe != basis.baseline
    differing = _differing(answer) if answer.gpu is None else ""
    compiled: list[str] = []
    if answer.gpu is not None and (basis.near != "same" or basis.kind == "predicted"):
        compiled = only_compiled(resolve_cached(chosen.recipe), capability_of(answer.gpu))
    grave = {
        f"it was measured on {basis.model}, another model of the family": basis.model != answer.model,
        f"on {differing} another recipe is best: give --gpu": differing,
        f"it was measured on another GPU, {basis.gpu}": basis.near == "other",
        **{f"{name} was compiled for {answer.gpu}, and never measured on it": True for name in compiled},
        "its gain is that of the denoiser's operations, counted and not timed": chosen.is_counted,
        "its memory is estimated, and its time predicted and not measured": basis.kind == "predicted",
        "it changes the images, and nothing is known of their quality": is_changed and chosen.judged is None,
    }
    sold, peak, fewer = _with_several_sizes(answer), chosen.peak_bytes or 0, chosen.num_rounds
    is_unchecked = (
        basis.near in ("generation", "other") and answer.criteria.max_bytes is None and card is None
    )
    spread = chosen.spread
    light = {
        f"it was measured on {basis.gpu}, another GPU of the same generation": basis.near == "generation",
        "the numbers are others', without intervals": basis.kind == "published",
        "the records are others', reported with `vivace contribute`": basis.kind == "community",
        "random weights: times and memory hold, images were not judged": (
            basis.random_weights and basis.kind != "predicted"
        ),
        "the quality of its images is not proven on this model": (
            is_changed and chosen.judged is not None and (chosen.judged.of or gate is not Gate.PASSED)
        ),
        "its images were not judged": is_own and not is_changed and chosen.judged is None,
        "the quality of its images is not proven": (
            is_own and not is_changed and chosen.judged is not None and gate is not Gate.PASSED
        ),
        f"one process only: differences under {100 * ONE_ROUND_MARGIN:.0f} % may be drift": (
            fewer is not None and fewer < 2
        ),
        f"timed over {chosen.timed_steps} steps, and scaled to {basis.steps}": chosen.timed_steps is not None,
        "others cannot be told from it": answer.is_tie or answer.ties,
        "p99 needs 200 timed calls": (
            answer.criteria.goal == "stability" and (spread is None or spread.p99_s is None)
        ),
        f"whether its {size(peak)} fit this GPU was not checked: give --max-memory": is_unchecked and peak,
        f"its peak memory is not known; the model as published fits the {size(card or 0)}": card and not peak,
        ""
        if sold is None
        else f"{sold.chip.name} is sold with {sold.chip.sizes} GB: "
        f"{sold.chip.memory_gb[0]:g} are assumed, say which": sold is not None,
        basis.note: basis.note,
        chosen.note: chosen.note,
    }
    doubts = [[text for text, holds in each.items() if holds] for each in (grave, light)]
    return "low" if doubts[0] else "medium" if doubts[1] else "high", (*doubts[0], *doubts[1])


def _with_several_sizes(answer: Recommendation) -> Gpu | None:
    """Return a named GPU that is sold with several sizes of memory, if the name does not say which; else None."""
    gpu = None if answer.criteria.gpu is None else known_gpu(answer.criteria.gpu)
    return gpu if gpu is not None and gpu.is_size_assumed else None


def _differing(answer: Recommendation) -> str:
    """Return a GPU on which an equally good source names another recipe; "" if there is none."""
    basis = answer.basis
    assert basis is not None
    for other in answer.elsewhere:
        is_alike = (other.basis.kind, other.basis.model) == (basis.kind, basis.model)
        if is_alike and other.basis.gpu != basis.gpu and other.best.recipe != answer.recipe:
            return other.basis.gpu
    return ""


def disturbance_of(answer: Recommendation) -> str:
    """Return that the user's own records were disturbed, and what to do, in words; "" if they were not."""
    if not answer.disturbed:
        return ""
    recipes = few(answer.disturbed[1:], _MOST)
    return f"{DISTURBED_BY} disturbed your own times of {recipes}: they claim no gain; measure again when all is quiet"


def next_commands(answer: Recommendation, tried: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return the commands to run next, the most useful first."""
    again = [_bench(answer, [*answer.disturbed[: _MOST + 1]]) + " --rerun"] if answer.disturbed else []
    return tuple(dict.fromkeys((*again, *_unmeasured(answer, tried))))


def _unmeasured(answer: Recommendation, tried: frozenset[str]) -> tuple[str, ...]:
    """Return the commands that measure what would make the answer surer."""
    criteria, basis, chosen = answer.criteria, answer.basis, answer.chosen
    if basis is None or chosen is None:
        plan = ["vivace", "plan", criteria.model.strip()]
        if criteria.max_bytes is not None:
            plan += [
                "--card",
                f"{min(criteria.max_bytes, answer.card_bytes or criteria.max_bytes) / 1e9:.4g}",
            ]
        if answer.card_bytes is not None and answer.gpu is not None and known_gpu(answer.gpu) is not None:
            plan += ["--gpu", answer.gpu]
        return (*([shlex.join(plan)] if len(plan) > 3 else []), _bench(answer, [BASELINE]))
    too_large = {candidate.recipe for candidate in answer.left_out if candidate.kind == "memory"}
    recipes = [recipe for recipe in (basis.baseline, chosen.recipe) if recipe not in too_large]
    if chosen.recipe == basis.baseline:  # what would be better, were it proven
        unproven = [each for each in answer.left_out if each.kind == "unproven" and (each.score or 0) > 1]
        recipes += [candidate.recipe for candidate in unproven[:2]]
    if answer.runner_up is not None and answer.runner_up.recipe != basis.baseline:
        recipes.append(answer.runner_up.recipe)
    mine = [other for other in answer.elsewhere if other.basis.model == answer.model]
    if basis.kind == "own" and basis.is_direct and basis.model == answer.model:
        untried = [other.best.recipe for other in answer.elsewhere if other.best.recipe not in tried]
        commands = []
        if untried:
            commands.append(_bench(answer, [basis.baseline, chosen.recipe, *untried[:2]]))
        if answer.sure != "high" or not untried:
            commands.append(_bench(answer, recipes) + (" --rounds 4" if answer.ties else ""))
        return tuple(commands)
    others = sorted(mine, key=lambda other: not other.gains_more)
    others = [other for other in others if other.gains_more or other.basis.is_direct]
    return (_bench(answer, [*recipes, *(other.best.recipe for other in others[:1])]),)


def _bench(answer: Recommendation, recipes: list[str]) -> str:
    """Return the command that measures recipes on the model, with the options that the goal and the quality need."""
    model, goal, task = answer.criteria.model.strip(), answer.criteria.goal, answer.criteria.task
    if set(recipes) == {BASELINE}:
        recipes = [*recipes, "compile"]
    parts = ["vivace", "bench", "--model", model]
    for recipe in dict.fromkeys(recipes):
        parts += ["--recipe", recipe]
    parts += ["--task", task] if task != "text" else []
    entry = CATALOGUE.get(answer.model)
    if not model.startswith(SYNTHETIC):
        parts += ["--prompt-set", entry.prompt_set if entry is not None else "real"]
    parts += ["--device", "cpu"] if (answer.gpu or "").lower() == "cpu" else []
    parts += ["--batch", "1,2,4,max"] if goal in ("throughput", "cost") else []
    parts += ["--repeats", "100"] if goal == "stability" else []  # two rounds: p99 needs 200 timed calls
    return shlex.join(parts)
