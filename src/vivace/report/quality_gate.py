"""The quality gate: whether a recipe's images are close enough to the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import HIDDEN, Record
from vivace.foundation.stats import MIN_GROUPS, Gate, Interval, gate
from vivace.report.fidelity import ANOTHER_BELOW, LOST, Fidelity, KeptShare, NamedImage
from vivace.report.variety import Variety, VarietyShare

MAX_FLAT_SHARE = 0.05
"""Share of flat images above which a recipe is broken. A model may leave the object out of one image in many."""


@dataclass(frozen=True)
class Judgement:
    """The gate's verdict on a recipe.

    Attributes:
        figure: that decides: `clip`, `witness`, `match`, `ssim`, `psnr_db`, `outside`, `source`, `variety` or `broken`.
    """

    gate: Gate
    reason: str
    figure: str | None = None
    words: str = field(default="", compare=False)


def judge(
    record: Record, baseline: Record, fidelity: Fidelity | None, floor: Fidelity | None, limits: Limits
) -> Judgement | None:
    """Return the gate's verdict on a recipe; None if there was no quality pass and no image is broken.

    Broken images (black, flat, noise) fail any recipe; `judge_figures` decides on the others.
    """
    reason = broken_images(record, baseline)
    if reason is not None:
        return Judgement(Gate.FAILED, reason, "broken", f"images not kept: {reason}")
    if fidelity is None:
        return None
    images = record.rounds[0].pictures
    if images and all(HIDDEN in image.faults for image in images):
        reason = (
            "the model's safety checker replaced all images by black ones, of this recipe and of the baseline"
        )
        return Judgement(Gate.UNCLEAR, reason, "broken", "images not judged: a safety checker hid them")
    return judge_figures(
        fidelity,
        floor,
        limits,
        same_picture=record.trial.recipe.same_picture,
        edits=record.trial.workload.task == "edit",
    )


def judge_figures(
    fidelity: Fidelity, floor: Fidelity | None, limits: Limits, *, same_picture: bool, edits: bool = False
) -> Judgement:
    """Return the gate's verdict on images that are not broken.

    All are held to the CLIP margin, and to the second witness's if there is one, and to variety; and none may have a
    hole. If they should be the same images as the baseline's, they are held to fidelity as well, each for itself and on
    average, but never to more than the baseline reaches against itself.

    Args:
        floor: the baseline against itself; None if unknown.
        limits: of the scorer, see `Limits.for_scorer`.
        same_picture: whether the images should be the same as the baseline's.
        edits: whether the images should be like the images that they were made from.
    """
    judgement = _judge_all(fidelity, floor, limits, same_picture=same_picture, edits=edits)
    return replace(judgement, words=in_words(judgement, fidelity, same_picture=same_picture))


def in_words(judgement: Judgement, fidelity: Fidelity, *, same_picture: bool) -> str:
    """Return a verdict for people, e.g. "images kept: 13 of 13 show what was asked"."""
    number, has_clip = fidelity.num_pictures, fidelity.clip is not None
    if fidelity.num_identical == number:
        return f"images kept: all {number} are the baseline's, to the last pixel"
    lost, others = fidelity.num_lost, fidelity.num_lost_or_other - fidelity.num_lost
    shown = f"{number - lost} of {number} show what was asked"
    if not has_clip:
        shown = f"{number - lost - others} of {number} are like the baseline's"
    elif same_picture and others:
        shown += f", but {others} {'is' if others == 1 else 'are'} not the baseline's but another"
    elif judgement.gate is Gate.FAILED and not lost:
        shown += _BUT.get(judgement.figure or "", "")
    if judgement.gate is Gate.UNCLEAR and not has_clip and not (same_picture and fidelity.match):
        return f"images not judged: {judgement.reason.partition(';')[0]}"
    kept = {Gate.PASSED: "kept", Gate.FAILED: "not kept", Gate.UNCLEAR: "perhaps kept"}[judgement.gate]
    return f"images {kept}: {shown}{', and that is not sure' if judgement.gate is Gate.UNCLEAR else ''}"


_BUT = {
    "clip": ", but less clearly",
    "witness": ", but less clearly to a second model",
    "outside": ", but changed outside of the mask",
    "source": ", but are less like their sources",
    "variety": ", but are too much alike",
    **dict.fromkeys(("match", "ssim", "psnr_db"), ", but differ from the baseline's"),
}


def _judge_all(
    fidelity: Fidelity, floor: Fidelity | None, limits: Limits, *, same_picture: bool, edits: bool
) -> Judgement:
    if fidelity.num_identical == fidelity.num_pictures:
        return Judgement(Gate.PASSED, "all images are identical to the baseline's")
    if fidelity.holes:
        return Judgement(Gate.FAILED, _named(fidelity, fidelity.holes, *_HAS_HOLE), "broken")
    judgements: list[Judgement] = []
    clip = limits.for_scorer(None).clip
    if isinstance(clip, float):
        judgements.append(_judge_margin(fidelity, "clip", clip))
    if fidelity.witness is not None and limits.witness is not None:
        judgements.append(_judge_margin(fidelity, "witness", limits.witness))
    if fidelity.outside is not None and limits.outside is not None:
        limit = _relaxed(limits.outside, fidelity.outside_of_baseline, "which is what the baseline leaves")
        label = "match outside the mask"
        judgements.append(_judge_kept(fidelity, "outside", label, fidelity.outside, *limit))
    if edits and fidelity.source is not None and limits.source is not None:
        judgements.append(_judge_margin(fidelity, "source", limits.source))
    if same_picture:
        judgements += _judge_fidelity(fidelity, floor, limits)
    varied = None if limits.variety is None else _judge_variety(judgements, fidelity, limits.variety)
    # That the same pictures vary as much goes without saying.
    if varied is not None and not (same_picture and varied.gate is Gate.PASSED):
        judgements.append(varied)
    return _worst(judgements, "no limit on quality is set")


def broken_images(record: Record, baseline: Record) -> str | None:
    """Return e.g. "2 of 6 images are broken (black)"; None if at most a few flat images are.

    An image that is broken in the baseline too (e.g. a safety checker's black frame) does not count.
    """
    excused = set()
    if record is not baseline:
        excused = {(p.prompt, p.seed) for p in baseline.rounds[0].pictures if p.faults}
    return broken([() if (p.prompt, p.seed) in excused else p.faults for p in record.rounds[0].pictures])


def broken(faults: Sequence[Sequence[str]]) -> str | None:
    """Describe how many images are broken, from the faults of each; None if few enough are."""
    bad = [tuple(names) for names in faults if names]
    if all(faulty == ("flat",) for faulty in bad) and len(bad) <= MAX_FLAT_SHARE * len(faults):
        return None
    kinds = ", ".join(sorted({fault for faulty in bad for fault in faulty}))
    return f"{len(bad)} of {len(faults)} images are broken ({kinds})"


def _judge_fidelity(fidelity: Fidelity, floor: Fidelity | None, limits: Limits) -> list[Judgement]:
    judgements: list[Judgement] = []
    lowest = 1.0 if floor is None or floor.match is None else floor.match.lowest
    others = [each for each in fidelity.others if lowest >= ANOTHER_BELOW or each.match < lowest]
    if limits.match is not None:
        if fidelity.match is None:
            reason = "the images were compared by an older vivace; the same `vivace bench` again adds what is missing"
            judgements.append(Judgement(Gate.UNCLEAR, reason, "match"))
        else:
            reached = None if floor is None or floor.match is None else floor.match.bounds
            relaxed = _relaxed(limits.match, reached)
            judgement = _judge_kept(fidelity, "match", "match", fidelity.match, *relaxed)
            if others and judgement.gate is not Gate.FAILED:  # a mean hides them
                judgement = Judgement(Gate.FAILED, _named(fidelity, others, *_IS_ANOTHER), "match")
            judgements.append(judgement)
    for name, label, unit, value, limit, itself in (
        ("ssim", "SSIM", "", fidelity.ssim, limits.ssim, floor.ssim if floor else None),
        ("psnr_db", "PSNR", " dB", fidelity.psnr_db, limits.psnr_db, floor.psnr_db if floor else None),
    ):
        if limit is None:
            continue
        if value is None:
            judgements.append(Judgement(Gate.UNCLEAR, f"no {label} could be computed"))
            continue
        digits = 3 if name == "ssim" else 1
        judged = _judge_figure(value, *_relaxed(limit, itself), label, digits, unit)
        judgements.append(replace(judged, figure=name))
    return judgements


def _named(fidelity: Fidelity, images: Sequence[NamedImage], verb: str, of_several: str, what: str) -> str:
    worst = sorted(images, key=lambda image: image.match)[:_MOST_NAMED]
    listed = ", ".join(f"{image.name} (match {image.match:.2f})" for image in worst)
    more = ", ..." if len(images) > len(worst) else ""
    what = f"{verb if len(images) == 1 else of_several} {what}"
    return f"{len(images)} of {fidelity.num_pictures} images {what}: {listed}{more}"


_MOST_NAMED = 3
_HAS_HOLE = ("has", "have", "a hole, a patch of one colour that the baseline's lacks")
_IS_ANOTHER = ("is", "are", "not the baseline's but another")


def _relaxed(
    limit: float, reached: Interval | None, why: str = "which is what the baseline reaches against itself"
) -> tuple[float, str]:
    """Return a limit that asks for no more than the baseline reaches, and why it is lower."""
    if reached is None or reached.low is None or reached.low >= limit:
        return limit, ""
    return reached.low, f", {why}"


def _judge_margin(fidelity: Fidelity, name: str, minimum: float) -> Judgement:
    """Judge the kept share of the margin of the CLIP model, for prompts or for sources, or of the second witness."""
    kept: KeptShare | None = getattr(fidelity, name)
    label = {
        "clip": "CLIP margin kept",
        "witness": "second witness's margin kept",
        "source": "likeness to the source kept",
    }[name]
    if kept is None:
        reason = (
            "no CLIP model scored the images"
            if fidelity.clip_score is None
            else few_prompts(fidelity.num_prompts)
            if fidelity.num_prompts < MIN_GROUPS
            else "CLIP scores the baseline's images no higher with their own prompts than with others"
        )
        return Judgement(Gate.UNCLEAR, reason, name)
    return _judge_kept(fidelity, name, label, kept, minimum, "")


def judge_variety(variety: Variety, minimum: float) -> Judgement | None:
    """Judge how much images differ from each other. One distance is enough to fail; all together pass.

    None where too few prompts have several seeds for a verdict, and none of them has copies.
    """
    lowest = variety.lowest
    if variety.copies:
        which = f'"{variety.copies[0]}"' + (
            f" and {len(variety.copies) - 1} more" if variety.copies[1:] else ""
        )
        reason = f"all seeds of {which} give nearly the same image, and the baseline's do not"
        return Judgement(Gate.FAILED, reason, "variety")
    limit = f"the limit is {100 * minimum:g} %"
    if lowest.bounds.high is not None and lowest.bounds.high < minimum:
        reason = (
            f"{_among(lowest, variety)} {_percent(lowest.bounds.point)} % of the baseline's, below "
            f"{_percent(lowest.bounds.high)} with 90 % confidence: {limit}"
        )
        return Judgement(Gate.FAILED, reason, "variety")
    bounds = variety.bounds
    if bounds.low is None or bounds.high is None:
        return None
    label = "differences between seeds" if variety.num_seeds > 1 else "differences between prompts"
    text = f"{label} {_percent(bounds.point)} % of the baseline's"
    if bounds.low < minimum:
        between = f"[{_percent(bounds.low)}, {_percent(bounds.high)}]"
        return Judgement(Gate.UNCLEAR, f"{text} {between}: too few images to decide, {limit}", "variety")
    reason = f"{text}, above {_percent(bounds.low)} with 95 % confidence; {limit}"
    if variety.num_seeds == 1:
        reason += "; with one seed a prompt nothing tells whether seeds differ"
    return Judgement(Gate.PASSED, reason, "variety")


_NOT_COMPARED = (
    "how much the images differ from each other was not compared, by an older vivace; the same `vivace bench` again "
    "adds it"
)


def _judge_variety(judgements: Sequence[Judgement], fidelity: Fidelity, minimum: float) -> Judgement | None:
    """Return the verdict on the images' variety. Alone it cannot pass: varied images may show anything."""
    if fidelity.variety is None:
        is_old = bool(judgements) and fidelity.num_pictures > 1 and not fidelity.has_thumbnails
        return Judgement(Gate.PASSED, _NOT_COMPARED, "variety") if is_old else None
    judgement = judge_variety(fidelity.variety, minimum)
    return judgement if judgement is not None and (judgements or judgement.gate is Gate.FAILED) else None


def _among(share: VarietyShare, variety: Variety) -> str:
    """Name the compared differences, e.g. "differences between the closest seeds of each prompt (colours)"."""
    what = {
        ("seeds", False): "differences between seeds",
        ("seeds", True): "differences between the closest seeds of each prompt"
        if variety.num_seeds > 2
        else "differences between the two seeds of each prompt",
        ("prompts", False): "differences between prompts",
        ("prompts", True): "differences between each image and the closest of another prompt",
    }[share.among, share.closest]
    return f"{what} ({share.distance})"


def _judge_kept(
    fidelity: Fidelity, name: str, label: str, kept: KeptShare, minimum: float, relaxed: str
) -> Judgement:
    text, bounds = f"{label} {_percent(kept.mean.point)} %", kept.bounds
    limit = f"the limit is {100 * minimum:g} %{relaxed}"
    if kept.worst.best < LOST and kept.worst.num_pictures > 1:
        of_all = f"{label} at most {_percent(kept.worst.best)} %"
        prompt = f'in all {kept.worst.num_pictures} images of "{kept.worst.prompt}"'
        return Judgement(Gate.FAILED, f"{of_all} {prompt}; {text} over all prompts", name)
    if bounds.low is None or bounds.high is None:
        return Judgement(Gate.UNCLEAR, f"{text}: {few_prompts(fidelity.num_prompts)}", name)
    # The interval is that of the capped mean; the uncapped mean could lie outside it.
    capped = f"{label} {_percent(bounds.point)} %, single images capped"
    verdict = gate(bounds, minimum)
    if verdict is Gate.FAILED:
        reason = f"{text}, below {_percent(bounds.high)} with 90 % confidence: {limit}"
    elif verdict is Gate.PASSED:
        reason = f"{capped}, above {_percent(bounds.low)} with 95 % confidence; {limit}"
    else:
        between = f"[{_percent(bounds.low)}, {_percent(bounds.high)}]"
        reason = f"{capped} {between}: too few images to decide, {limit}"
    return Judgement(verdict, reason, name)


def few_prompts(number: int) -> str:
    return f"a verdict needs {MIN_GROUPS} prompts or more, here {'is' if number == 1 else 'are'} {number}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _judge_figure(
    value: Interval, minimum: float, relaxed: str, label: str, digits: int, unit: str
) -> Judgement:
    verdict = gate(value, minimum)
    text = f"{label} {value.point:.{digits}f}"
    if value.low is None or value.high is None:
        return Judgement(verdict, f"{text}{unit}: a verdict needs {MIN_GROUPS} prompts")
    text += f" [{value.low:.{digits}f}, {value.high:.{digits}f}]{unit}"
    limit = f"the limit is {minimum:.{digits}f}{unit}{relaxed}"
    if verdict is Gate.UNCLEAR:
        return Judgement(verdict, f"{text}: too few images to decide, {limit}")
    return Judgement(verdict, f"{text}; {limit}" if verdict is Gate.PASSED else f"{text}: {limit}")


def _worst(judgements: Sequence[Judgement], otherwise: str) -> Judgement:
    for verdict in (Gate.FAILED, Gate.UNCLEAR, Gate.PASSED):
        matching = [j for j in judgements if j.gate is verdict]
        if matching:
            return Judgement(verdict, "; ".join(j.reason for j in matching), matching[0].figure)
    return Judgement(Gate.UNCLEAR, otherwise)
