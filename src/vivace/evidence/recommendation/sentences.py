"""Sentences of an answer: the cost in quality, why the runner-up lost, how sure this is, and what to run next."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.architectures import CATALOGUE
from vivace.evidence.parsed import resolve
from vivace.evidence.standing import only_compiled
from vivace.foundation.hardware import Gpu, capability_of, known_gpu
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.stats import ONE_ROUND_MARGIN, Gate
from vivace.models.find import SYNTHETIC

if TYPE_CHECKING:
    from vivace.evidence.recommendation.recommendation import (
        Basis,
        Elsewhere,
        RecipeFigures,
        Recommendation,
        Sure,
    )


def quality_of(answer: Recommendation) -> str:
    """Return a sentence on the chosen recipe's images."""
    chosen, basis = answer.chosen, answer.basis
    assert chosen is not None
    assert basis is not None
    if chosen.recipe == basis.baseline:
        return "it is the baseline that the others are compared with"
    judged = chosen.judged
    if judged is not None and judged.of:
        return (
            f"judged on {judged.of}, a small model of the same kind, not on {basis.model}: "
            f"{_gate_word(judged.gate)} ({judged.reason})"
        )
    if judged is not None:
        return f"{_gate_word(judged.gate)}: {judged.reason}"
    keeps = (
        f"over {basis.baseline} it only reorders or rounds arithmetic, which is declared to keep the image"
    )
    if basis.kind == "predicted":
        return f"{keeps}; not judged on this model"
    if basis.random_weights:
        return f"{keeps}; not judged, since the weights are random"
    if basis.kind == "published":
        text = "unknown: the source publishes no figure of its images"
        return f"{text}; {keeps}" if chosen.same_picture else f"{text}, and it changes them"
    return f"{keeps}; no images were judged" if chosen.same_picture else "no images were judged"


def _gate_word(gate: Gate | None) -> str:
    return {Gate.PASSED: "passes the quality gate", Gate.FAILED: "fails the quality gate"}.get(
        gate or Gate.UNCLEAR, "not proven"
    )


def figure_of(figures: RecipeFigures, answer: Recommendation, over: str = "") -> str:
    """Return a recipe's figure for the goal: "1.83x [1.70, 1.97] over baseline, 2.74 s".

    Args:
        over: the baseline, where it has to be named.
    """
    goal = answer.criteria.goal
    if goal == "memory":
        peak = "peak memory unknown" if figures.peak_bytes is None else size(figures.peak_bytes)
        return peak + ("" if figures.gain is None else f" at {figures.gain.point:.2f}x the speed")
    if goal == "stability":
        return spread_of(figures)
    is_baseline = (
        answer.basis is not None
        and figures.recipe == answer.basis.baseline
        and figures.batch == answer.basis.batch
    )
    text = (
        "" if figures.gain is None or is_baseline else ratio(figures.gain) + (f" over {over}" if over else "")
    )
    if figures.predicted_from is not None:
        text = text if figures.measured_s is not None else ""
        text += f"{', ' if text else ''}{predicted_of(figures)}"
    elif figures.latency is not None:
        rate = (
            f"{1 / figures.latency.point:.3g} images/s"
            if goal == "throughput"
            else seconds(figures.latency.point)
        )
        text = f"{text}, {rate}" if text else rate
    if goal == "cost" and figures.cost_per_1000 is not None:
        text += f", {figures.cost_per_1000:.3g} per 1,000 images"
    return text


def time_of(figures: RecipeFigures) -> str:
    """Return the seconds of an image: measured with their interval, or predicted with their origin."""
    if figures.predicted_from is not None or figures.latency is None:
        return predicted_of(figures)
    return f"{plus_minus(figures.latency)} measured"


def predicted_of(figures: RecipeFigures) -> str:
    """Return a time that was not measured on the requested GPU, and its origin."""
    parts = []
    if figures.latency is not None:
        parts.append(f"about {seconds(figures.latency.point)} predicted")
    if figures.measured_s is not None:
        parts.append(f"{seconds(figures.measured_s)} measured on {figures.predicted_from}")
    return ", ".join(parts) or "time unknown"


def spread_of(figures: RecipeFigures) -> str:
    """Return how much a recipe's calls differ."""
    spread = figures.spread
    if spread is None:
        return "its spread is not known"
    calls = "" if spread.num_calls is None else f" of {spread.num_calls} calls"
    if spread.p99_s is not None:
        text = f"p99 {seconds(spread.p99_s)}, {spread.p99_s / spread.p50_s:.3f} of the median{calls}"
    elif spread.max_s is not None:
        text = f"longest {spread.max_s / spread.min_s:.3f} of the shortest{calls}"
    else:
        text = "its spread is not known"
    width = None if figures.latency is None else figures.latency.half_width
    return text if width is None else f"{text}, median ±{100 * width:.1f} %"


def why_lost(answer: Recommendation) -> str:
    """Return why the runner-up lost; "" without one."""
    chosen, other = answer.chosen, answer.runner_up
    if chosen is None or other is None:
        return ""
    if answer.is_tie:
        simpler = "the chosen one is "
        if chosen.num_techniques < other.num_techniques:
            simpler += (
                f"simpler ({chosen.num_techniques} techniques instead of {other.num_techniques})".replace(
                    "(1 techniques", "(1 technique"
                )
            )
        elif chosen.same_picture and not other.same_picture:
            simpler += "the one that keeps the image"
        elif answer.criteria.goal in ("memory", "stability"):
            simpler += "faster"
        else:
            simpler += "as simple, and ahead by its figure"
        return f"a tie: the difference is within the noise; {simpler}"
    share = chosen.score.point / other.score.point
    if chosen.is_counted and answer.criteria.goal != "memory":
        return f"computes {share:.2f} times as much"
    return {
        "memory": f"needs {share:.2f} times the memory",
        "stability": f"its calls differ more, {share:.3f} times",
    }.get(answer.criteria.goal, f"takes {share:.2f} times as long an image")


def assessed(answer: Recommendation) -> tuple[Sure, tuple[str, ...]]:
    """Return how sure an answer is, with the objections to it."""
    basis, chosen = answer.basis, answer.chosen
    assert basis is not None
    assert chosen is not None
    grave, light = [], []
    if basis.model != answer.model:
        grave.append(f"it was measured on {basis.model}, another model of the family")
    if answer.gpu is None and (elsewhere := _differing(answer)):
        grave.append(f"on {elsewhere} another recipe is best: give --gpu")
    if basis.near == "other":
        grave.append(f"it was measured on another GPU, {basis.gpu}")
    elif basis.near == "generation":
        light.append(f"it was measured on {basis.gpu}, another GPU of the same generation")
    if answer.gpu is not None and (basis.near != "same" or basis.kind == "predicted"):
        names = only_compiled(resolve(chosen.recipe), capability_of(answer.gpu))
        grave += [f"{name} was compiled for {answer.gpu}, and never measured on it" for name in names]
    if chosen.is_counted:
        grave.append("its gain is that of the denoiser's operations, counted and not timed")
    if basis.kind == "predicted":
        grave.append("its memory is estimated, and its time predicted and not measured")
    if basis.kind == "published":
        light.append("the numbers are others', without intervals")
    if basis.kind == "community":
        light.append("the records are others', reported with `vivace contribute`")
    if basis.random_weights and basis.kind != "predicted":
        light.append("random weights: times and memory hold, images were not judged")
    is_changed = not chosen.same_picture and chosen.recipe != basis.baseline
    if is_changed and chosen.judged is None:
        grave.append("it changes the images, and nothing is known of their quality")
    elif (
        is_changed
        and chosen.judged is not None
        and (chosen.judged.of or chosen.judged.gate is not Gate.PASSED)
    ):
        light.append("the quality of its images is not proven on this model")
    elif basis.kind == "own" and not basis.random_weights and chosen.recipe != basis.baseline:
        if chosen.judged is None:
            light.append("its images were not judged")
        elif chosen.judged.gate is not Gate.PASSED:
            light.append("the quality of its images is not proven")
    if chosen.num_rounds is not None and chosen.num_rounds < 2:
        light.append(f"one process only: differences under {100 * ONE_ROUND_MARGIN:.0f} % may be drift")
    if chosen.timed_steps is not None:
        light.append(f"timed over {chosen.timed_steps} steps, and scaled to {basis.steps}")
    if answer.is_tie or answer.ties:
        light.append("others cannot be told from it")
    if answer.criteria.goal == "stability" and (chosen.spread is None or chosen.spread.p99_s is None):
        light.append("p99 needs 200 timed calls")
    if (
        chosen.peak_bytes is not None
        and basis.near in ("generation", "other")
        and answer.criteria.max_bytes is None
        and answer.card_bytes is None
    ):
        light.append(f"whether its {size(chosen.peak_bytes)} fit this GPU was not checked: give --max-memory")
    if answer.card_bytes is not None and chosen.peak_bytes is None:
        light.append(
            f"its peak memory is not known; the model as published fits the {size(answer.card_bytes)}"
        )
    if (named := _with_several_sizes(answer)) is not None:
        chip = named.chip
        light.append(
            f"{chip.name} is sold with {chip.sizes} GB: {chip.memory_gb[0]:g} are assumed, say which"
        )
    light += [note for note in (basis.note, chosen.note) if note]
    sure: Sure = "low" if grave else "medium" if light else "high"
    return sure, (*grave, *light)


def _with_several_sizes(answer: Recommendation) -> Gpu | None:
    """Return a named GPU that is sold with several sizes of memory, if the name does not say which; else None."""
    gpu = None if answer.criteria.gpu is None else known_gpu(answer.criteria.gpu)
    return gpu if gpu is not None and gpu.is_size_assumed else None


def _differing(answer: Recommendation) -> str:
    """Return a GPU on which an equally good source names another recipe; "" if there is none."""
    basis = answer.basis
    for other in answer.elsewhere:
        is_alike = basis is not None and (other.basis.kind, other.basis.model) == (basis.kind, basis.model)
        if (
            basis is not None
            and is_alike
            and other.basis.gpu != basis.gpu
            and other.best.recipe != answer.recipe
        ):
            return other.basis.gpu
    return ""


def next_commands(
    answer: Recommendation, tried: frozenset[str] = frozenset(), *, is_disturbed: bool = False
) -> tuple[str, ...]:
    """Return the commands to run next, the most useful first.

    Args:
        is_disturbed: some of those records cannot be compared, so they have to be measured again.
        tried: recipes in the user's records on this GPU.
    """
    criteria, basis, chosen = answer.criteria, answer.basis, answer.chosen
    model = criteria.model.strip()
    if basis is None or chosen is None:
        commands = []
        if criteria.max_bytes is not None or answer.card_bytes is not None:
            limits = [limit for limit in (criteria.max_bytes, answer.card_bytes) if limit is not None]
            card = ["--card", f"{min(limits) / 1e9:.4g}"]
            if answer.gpu is not None and known_gpu(answer.gpu) is not None:
                is_whole = criteria.max_bytes is None or min(limits) == answer.card_bytes
                card = ["--card", answer.gpu] if is_whole else [*card, "--gpu", answer.gpu]
            commands.append(shlex.join(["vivace", "plan", model, *card]))
        return (*commands, _bench(answer, [BASELINE]))
    too_large = {candidate.recipe for candidate in answer.left_out if candidate.kind == "memory"}
    recipes = [recipe for recipe in (basis.baseline, chosen.recipe) if recipe not in too_large]
    if chosen.recipe == basis.baseline:  # what would be better, were it proven
        unproven = [
            candidate
            for candidate in answer.left_out
            if candidate.kind == "unproven" and (candidate.score or 0) > 1
        ]
        recipes += [candidate.recipe for candidate in unproven[:2]]
    if answer.runner_up is not None and (answer.runner_up.recipe != basis.baseline):
        recipes.append(answer.runner_up.recipe)
    again = " --rerun" if is_disturbed else ""
    if basis.kind == "own" and basis.is_direct and basis.model == answer.model:
        untried = [other.best.recipe for other in answer.elsewhere if other.best.recipe not in tried]
        commands = []
        if untried:
            commands.append(_bench(answer, [basis.baseline, chosen.recipe, *untried[:2]]) + again)
        if answer.sure != "high" or not untried:
            commands.append(_bench(answer, recipes) + (" --rounds 4" if answer.ties else "") + again)
        return tuple(dict.fromkeys(commands))
    mine = [other for other in answer.elsewhere if other.basis.model == answer.model]
    others = [source for source in mine if source.gains_more] + [
        source for source in mine if source.basis.is_direct
    ]
    return (_bench(answer, [*recipes, *(other.best.recipe for other in others[:1])]) + again,)


def _bench(answer: Recommendation, recipes: list[str]) -> str:
    """Return the command that measures recipes on the model, with the options that the goal and the quality need."""
    model = answer.criteria.model.strip()
    if set(recipes) == {BASELINE}:
        recipes = [*recipes, "compile"]
    parts = ["vivace", "bench", "--model", model]
    for recipe in dict.fromkeys(recipes):
        parts += ["--recipe", recipe]
    if answer.criteria.task != "text":
        parts += ["--task", answer.criteria.task]
    entry = CATALOGUE.get(answer.model)
    if not model.startswith(SYNTHETIC):
        parts += ["--prompt-set", entry.prompt_set if entry is not None else "real"]
    if (answer.gpu or "").lower() == "cpu":
        parts += ["--device", "cpu"]
    if answer.criteria.goal in ("throughput", "cost"):
        parts += ["--batch", "1,2,4,max"]
    if answer.criteria.goal == "stability":
        parts += ["--repeats", "100"]  # two rounds: p99 needs 200 timed calls
    return shlex.join(parts)


def where(basis: Basis) -> str:
    """Return the place of a table in words: its owner, place, device, and the amount of measurements."""
    whose = {
        "own": f"your records in {basis.place}",
        "committed": f"vivace's record {basis.place}",
        "community": f"{basis.place}, reported by others",
        "published": f"{basis.place}, published by others",
        "predicted": f"{basis.place} from data sheets, and records of other GPUs",
    }[basis.kind]
    parts = [f"{basis.of}, whose architecture it has" if basis.of else basis.model, basis.gpu]
    if basis.height and basis.width:
        parts.append(f"{basis.width}x{basis.height}")
    if basis.steps:
        parts.append(f"{basis.steps} step{'s' if basis.steps != 1 else ''}")
    if basis.batch != 1:
        parts.append(f"batch {basis.batch}")
    if basis.random_weights:
        parts.append("random weights")
    return f"{whose}: {', '.join(parts)}"


def elsewhere_of(elsewhere: Elsewhere, answer: Recommendation) -> str:
    """Return another source's advice, marked where it is about another model or GPU."""
    differs = {"model": elsewhere.basis.model != answer.model, "GPU": not elsewhere.basis.is_direct}
    other = [word for word, is_other in differs.items() if is_other]
    marked = f"another {' and '.join(other)}; " if other else ""
    figure = figure_of(elsewhere.best, answer, elsewhere.basis.baseline)
    return f"{marked}{where(elsewhere.basis)}: {elsewhere.best.title} {figure}"
