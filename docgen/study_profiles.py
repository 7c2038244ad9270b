"""The profiles of study 002's runs, as a section of its page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from benchmarks.study_profiles import OTHERS, is_of, read_profiles, runs
from vivace.answers.formatting import seconds
from vivace.answers.markdown import section_lines, table_markdown
from vivace.foundation.spec.profiling import Profile, Share
from vivace.foundation.untrusted.streams import markdown_cell, markdown_code_cell
from vivace.report.profile_answer import answer_of, tables_of

TOP = 10
_FAMILIES = ("GEMM", "convolution", "attention", "norm", "elementwise", "copy")


def lines(record: Path, *, tiny: bool = False) -> Iterator[str]:
    """Yield the section as Markdown."""
    profiles = read_profiles(record)
    cases = runs(tiny=tiny).cases
    yield "## Its profiles, here\n"
    yield (
        "The source's tables of operators are [below](#the-sources-other-tables-and-columns). These are of whole calls "
        "after the warm-up, with nothing compiled or tuned inside; each kernel counts once, so shares add up to 100 % "
        "([what the columns mean](../profile.md)).\n"
    )
    if not profiles:
        yield "Not measured yet: `python -m benchmarks.study_profiles` does it.\n"
        return
    yield f"| run | on | call | profiled | GPU busy | host late | {' | '.join(_FAMILIES)} |"
    yield "|" + " --- |" * (6 + len(_FAMILIES))
    by_label: dict[str, Profile] = {}
    for case in cases:
        profile = next((profile for profile in profiles if is_of(profile, case.recipe)), None)
        if profile is None:
            yield f"| {markdown_cell(case.label)} | not measured |" + " – |" * (4 + len(_FAMILIES))
            continue
        by_label[case.label] = profile
        times = [profile.plain_s, profile.traced_s, profile.gpu_busy_s, profile.host_late_s]
        cells = ["–" if value is None else seconds(value) for value in times]
        cells += [_share(profile.families, name, is_gpu=profile.gpu_busy_s is not None) for name in _FAMILIES]
        yield f"| {markdown_cell(case.label)} | {markdown_cell(_device(profile))} | {' | '.join(cells)} |"
    yield ""
    for label, profile in by_label.items():
        yield f"<details><summary>{escape(label)}: operators, components, gaps, waits, memory</summary>\n"
        yield f"{markdown_code_cell(profile.trial.title)}, {profile.num_denoiser_calls} denoiser calls\n"
        for table in tables_of(profile, TOP):
            yield from (f"**{table.title}**\n", *table_markdown(table), "")
        yield from (f"- {markdown_cell(warning)}" for warning in profile.warnings)
        yield "\n</details>\n"
    for device in dict.fromkeys(map(_device, by_label.values())):
        there = [(label, profile) for label, profile in by_label.items() if _device(profile) == device]
        if len(there) == 1:
            continue
        (first, before), *_, (last, after) = there
        yield f"<details><summary>{escape(first)} against {escape(last)}, on {escape(device)}</summary>\n"
        for section in answer_of(_named(after), _named(before), TOP).sections:
            yield from section_lines(section)
        yield "\n</details>\n"
    yield f"Made by `python -m benchmarks.study_profiles` ([record](../../results/{record.name})).\n"


def _device(profile: Profile) -> str:
    """Return what a profile was made on; no two devices' are compared."""
    return profile.environment.device_name


def _named(profile: Profile) -> Profile:
    """Return a profile without the row of many operators, which is not one that went or appeared."""
    kept = tuple(operator for operator in profile.operators if not operator.name.startswith(OTHERS))
    return profile.model_copy(update={"operators": kept})


def _share(shares: Sequence[Share], name: str, *, is_gpu: bool) -> str:
    times = {share.name: share.cuda_s if is_gpu else share.cpu_s for share in shares}
    total = sum(times.values())
    return f"{times.get(name, 0) / total:.0%}" if total else "–"
