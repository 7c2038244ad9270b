"""The result of a comparison in a headline and a few sentences."""

from __future__ import annotations

from collections.abc import Sequence

from vivace.answers.formatting import list_names, ratio, seconds, sentence, size
from vivace.foundation.spec.record import Outcome
from vivace.foundation.stats import Gate, Verdict
from vivace.report.rows import Row

_MAX_NAMED = 4


def summary(rows: Sequence[Row]) -> str:
    return " ".join([headline(rows), *particulars(rows)])


def headline(rows: Sequence[Row]) -> str:
    """Return the result in one short sentence: the fastest recipe that passes on quality, and by how much."""
    if not rows:
        return "Nothing has been measured yet."
    baseline, best = rows[0], fastest(rows)
    if baseline.latency is None:
        reason = (baseline.reason or "no reason was stored").rstrip(".")
        return f"The reference {baseline.name} was not measured: {reason}."
    if len(rows) == 1:
        return f"{seconds(baseline.latency.median.point)} an image with {baseline.name}."
    if best is None:
        only_failed = any(r.failed_quality and r.verdict is Verdict.FASTER for r in rows)
        kind = "recipe that passes on quality" if only_failed else "recipe"
        return f"No {kind} was faster than {baseline.name} beyond the noise of this measurement."
    assert best.speedup is not None
    text = "is the fastest"
    if _is_doubtful(best) and not best.record.trial.model.is_synthetic:
        text = "was the fastest, but its quality is not proven"
    elif best.record.trial.model.is_synthetic or _equals(rows, best):
        text = "was the fastest"
    return f"{best.name} {text}: {ratio(best.speedup)} the speed of {baseline.name}."


def particulars(rows: Sequence[Row]) -> list[str]:
    """Return the sentences after the headline: ties, time and memory, quality, and what is missing or failed."""
    if not rows:
        return []
    baseline, best = rows[0], fastest(rows)
    if baseline.latency is None:
        return ["Nothing can be compared with it."]
    text = (
        [] if best is None else [*_ties(rows, best), _time_and_memory(best, baseline), *_quality(rows, best)]
    )
    return text + _caveats(rows)


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the fastest recipe that passes on quality; if none is proven to pass, the fastest that does not fail.

    None if no recipe is faster than the baseline beyond the noise.
    """
    return max(_candidates(rows), key=_gain, default=None)


def standing(row: Row) -> str:
    if row.judgement is None or row.record.trial.model.is_synthetic:
        return "quality not judged"
    return "quality not proven" if _is_doubtful(row) else ""


def _candidates(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that are faster and pass on quality; if none is proven to pass, those that do not fail."""
    faster = _faster(rows)
    return [r for r in faster if r.judgement is not None and r.judgement.gate is Gate.PASSED] or faster


def _faster(rows: Sequence[Row]) -> list[Row]:
    return [
        r for r in rows[1:] if r.verdict is Verdict.FASTER and r.speedup is not None and not r.failed_quality
    ]


def _equals(rows: Sequence[Row], best: Row) -> list[Row]:
    return [r for r in _candidates(rows) if r is not best and _overlap(r, best)]


def _is_doubtful(row: Row) -> bool:
    return row.judgement is not None and row.judgement.gate is not Gate.PASSED


def _ties(rows: Sequence[Row], best: Row) -> list[str]:
    equals = _equals(rows, best)
    verb = "is" if len(equals) == 1 else "are"
    return [f"Within the noise {_named(equals)} {verb} as fast."] if equals else []


def _time_and_memory(best: Row, baseline: Row) -> str:
    assert best.latency is not None
    assert baseline.latency is not None
    text = (
        f"{seconds(best.latency.median.point)} an image instead of {seconds(baseline.latency.median.point)}"
    )
    if best.memory is not None and baseline.memory is not None:
        text += f", peak memory {size(best.memory.peak_bytes)} ({change(best, baseline)})"
    return text + "."


def _quality(rows: Sequence[Row], best: Row) -> list[str]:
    """Describe the quality of the fastest recipe, and name a faster one whose quality is unproven."""
    if best.record.trial.model.is_synthetic:
        return ["Random weights: its effect on image quality is not known."]
    if best.judgement is None:
        same = best.record.trial.recipe.same_picture
        return [] if same else ["Compare the images before you trust it."]
    if _is_doubtful(best):
        return ["Compare the images before you trust it."]
    sentences = [sentence(f"{best.judgement.words} ({best.judgement.reason})")]
    candidates = _candidates(rows)
    doubtful = max((r for r in _faster(rows) if r not in candidates), key=_gain, default=best)
    if _gain(doubtful) > _gain(best) and doubtful.speedup is not None:
        more = f"{doubtful.name} was faster still, {ratio(doubtful.speedup)}"
        sentences.append(f"{more}, but its quality is not proven.")
    return sentences


def _gain(row: Row) -> float:
    return row.speedup.point if row.speedup is not None else 0.0


def _overlap(row: Row, best: Row) -> bool:
    """Whether a row could be as fast as the best: the 95 % intervals of their speed-ups overlap."""
    if row.speedup is None or best.speedup is None or row.speedup.high is None or best.speedup.low is None:
        return True
    return row.speedup.high >= best.speedup.low


def _named(rows: Sequence[Row]) -> str:
    names = [row.name for row in rows[:_MAX_NAMED]]
    if len(rows) > _MAX_NAMED:
        names.append(f"{len(rows) - _MAX_NAMED} more")
    return list_names(names)


def _caveats(rows: Sequence[Row]) -> list[str]:
    caveats = []
    failed = [r for r in rows if r.failed_quality]
    if failed:
        verb = "fails" if len(failed) == 1 else "fail"
        caveats.append(f"{_named(failed)} {verb} on quality; the table says why.")
    judged = [r.judgement for r in rows if r.latency is not None and r.judgement is not None]
    unclear = sum(judgement.gate is Gate.UNCLEAR for judgement in judged)
    if unclear:
        caveats.append(f"The quality of {unclear} of {len(rows)} recipes is unclear; the table says why.")
    missing = sum(1 for r in rows if r.record.outcome is not Outcome.MEASURED)
    if missing:
        caveats.append(f"{missing} of {len(rows)} recipes could not be measured; the table says why.")
    return caveats


def noise_floor(baseline: Row) -> str:
    """Describe in one line how close the baseline is to itself; empty without a quality pass."""
    floor, reached = baseline.floor, baseline.noise_floor
    if floor is None:
        return ""
    if reached is None:
        return f"no noise floor: {floor.reason}" if floor.reason else ""
    if reached.num_identical == reached.num_pictures:
        text = "identical images"
    else:
        text = "" if reached.ssim is None else f"SSIM {reached.ssim.point:.3f}"
        if reached.psnr_db is not None and reached.worst_psnr_db is not None:
            text += f", PSNR {reached.psnr_db.point:.1f} dB, worst {reached.worst_psnr_db:.1f}"
        if reached.clip_kept is not None:
            text += f", CLIP margin kept {100 * reached.clip_kept.point:.1f} %"
    return f"noise floor, the baseline against itself ({floor.recipe}, {reached.num_pictures} images): {text}"


def fidelity(row: Row) -> str:
    """Compare the images with the baseline's: "45.2, 38.1" (mean and worst PSNR, dB) or "identical".

    Empty without a quality pass, and for the baseline itself.
    """
    fidelity = row.fidelity
    if fidelity is None or row.is_baseline:
        return ""
    if fidelity.psnr_db is None:
        return "identical" if fidelity.num_identical == fidelity.num_pictures else "not comparable"
    return f"{fidelity.psnr_db.point:.1f}, {fidelity.worst_psnr_db:.1f}"


def clip_kept(row: Row) -> str:
    """Return the share of the baseline's CLIP margin that is kept, e.g. "97.1 %".

    Empty without a scorer, and for the baseline.
    """
    fidelity = row.fidelity
    if fidelity is None or fidelity.clip_kept is None or row.is_baseline:
        return ""
    return f"{100 * fidelity.clip_kept.point:.1f} %"


def paid_back(row: Row) -> str:
    """Describe the compile time: "compiling took 34.1 s, 9.20 s from the disk cache; paid back from image 412 on".

    Empty if nothing was compiled.
    """
    compilation = row.compilation
    if compilation is None:
        return ""
    if compilation.fresh_s is None:
        longer = seconds(compilation.seconds)
        text = f"the first call took {longer} longer than later ones, with code from the disk cache"
    else:
        text = f"compiling took {seconds(compilation.fresh_s)}"
        if compilation.cached_s is not None:
            text += f", {seconds(compilation.cached_s)} from the disk cache"
    if row.is_baseline:
        return text
    if compilation.break_even_images is None:
        return f"{text}; never paid back: no gain over the baseline was shown"
    return f"{text}; paid back from image {compilation.break_even_images:,} on"


def change(row: Row, baseline: Row) -> str:
    """Return the change of peak memory against the baseline, e.g. "-3 %"."""
    assert row.memory is not None
    assert baseline.memory is not None
    percent = round(100 * (row.memory.peak_bytes / baseline.memory.peak_bytes - 1))
    return "unchanged" if percent == 0 else f"{percent:+d} %"
