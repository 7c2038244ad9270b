"""The page docs/several-gpus.md, from the records that `python -m benchmarks.several_gpus` writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.several_gpus import (
    COPIES,
    Case,
    cases,
    pair,
    profile_file,
    read_profiles,
    removed_cases,
    renamed,
    rest_of,
)
from benchmarks.step_profile import Profile
from benchmarks.technique_records import read_records
from docgen.models_measured import conditions_of
from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import Interval, speedup
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of

_HEADINGS = (
    "model", "recipe", "GPUs", "s/image", "speed-up over one GPU [95 % interval]", "target", "memory of the first GPU",
    "most on another", "exchanged a step", "first call",
)  # fmt: skip
_GPUS = (2, 4, 8)
_PROFILE = (
    "model",
    "recipe",
    "GPUs",
    "a step",
    "compute",
    "communication",
    "waiting",
    "idle",
    "launching",
    "CPU",
)


def page(note: str, record: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        record: a file that exists.
    """
    records = read_records(record)
    lines = [
        note,
        "# One image on several GPUs\n",
        "`parallel` compared with one GPU and otherwise the same recipe, on full-size models with **random weights** "
        "(`synthetic:NAME`) at their native size and number of steps, one image a call. Text encoders and VAE are in "
        "the call, and only on the first GPU. Times and memory are those of the real models; images mean nothing.\n",
        *conditions_of(records),
        *_revisions(records),
        *_changes(records),
        "",
        *_table(records),
    ]
    lines.append(
        "*Exchanged a step*: arguments and results between the first GPU and the others, without the collectives of "
        "attention inside a forward (ulysses, all_gather). *Most on another*: the peak allocated by PyTorch since it "
        "started.\n"
    )
    for other in other_cards(record):
        records = read_records(other)
        lines += [
            f"## On {records[0].environment.device_name}\n",
            *conditions_of(records),
            *_revisions(records),
            "",
            *_table(records),
            f"Made by `python -m benchmarks.several_gpus --record results/{other.name}` "
            f"([record](../results/{other.name})).\n",
        ]
    lines += _profiles(record)
    lines.append(f"Made by `python -m benchmarks.several_gpus` ([record](../results/{record.name})).")
    return "\n".join(lines) + "\n"


def other_cards(record: Path) -> list[Path]:
    """Return the records of other GPUs that lie beside a record."""
    return sorted(set(record.parent.glob(f"{record.stem}-*.json")) - {profile_file(record)})


def _table(records: Sequence[Record]) -> list[str]:
    """Return the table of a record, and below it what could not be measured; Markdown."""
    lines = markdown_lines(_HEADINGS, ())
    stated: list[Record] = []
    failed: list[str] = []
    planned = dict.fromkeys(case for gpus in _GPUS for case in (*cases(gpus), *removed_cases(gpus)))
    for case in planned:
        alone, shared = pair(case, records)
        if shared is None:
            continue
        if alone is not None and not any(alone is record for record in stated):
            stated.append(alone)
            lines += _line(case, alone, None, failed)
        lines += _line(case, shared, alone, failed)
    return [*lines, "", *failed, *([""] if failed else [])]


def gained(alone: Record, shared: Record) -> Interval | None:
    """Return the speed-up, None if either was not measured."""
    alone_s, several = (
        [sample.total_s for round_ in record.rounds for sample in round_.samples]
        for record in (alone, shared)
    )
    return speedup([alone_s], [several]) if alone_s and several else None


def _revisions(records: Iterable[Record]) -> list[str]:
    """Say which code the rows of several GPUs measured; it may have changed since."""
    shared = [record for record in records if "parallel" in record.trial.recipe.text]
    revisions = dict.fromkeys(record.environment.source_revision for record in shared)
    commands = [
        f"`git log {revision.partition('+')[0]}.. -- src/vivace/techniques src/vivace/machinery/multi_gpu`"
        for revision in revisions
        if revision is not None
    ]
    return (
        [f"- Changes since the rows of several GPUs were measured: {', '.join(commands)}"] if commands else []
    )


def _changes(records: Iterable[Record]) -> list[str]:
    """Say which rows were measured under an old name, or with an option that has been removed."""
    texts = [record.trial.recipe.text for record in records]
    lines = []
    if any(renamed(text) != text for text in texts):
        lines.append(
            "- Some rows were measured under old names of the modes: `guidance` for `cfg`, and for FLUX `ring` for "
            "`all_gather`, an all-gather of keys and values."
        )
    if any(COPIES in text for text in texts):
        lines.append(
            f"- Rows with `{COPIES}` were measured with an option that has been removed (`git log -S {COPIES} -- src` "
            "lists its commits)."
        )
    return lines


def soonest(record: Path) -> list[str]:
    """Return the fastest recipe that skips no work, for each model and number of GPUs; Markdown."""
    records = read_records(record)
    fastest: dict[tuple[str, int], tuple[float, str]] = {}
    for case in dict.fromkeys(case for gpus in _GPUS for case in cases(gpus)):
        alone, shared = pair(case, records)
        if alone is None or shared is None or not resolve(case.recipe).same_picture:
            continue
        gain, row = gained(alone, shared), rows_of([shared])[0]
        if gain is None or row.latency is None:
            continue
        took = row.latency.median
        line = f"- {case.name} on {case.gpus}: `{case.recipe}` {plus_minus(took)}, {ratio(gain)} the speed of one GPU."
        fastest[case.name, case.gpus] = min(
            (took.point, line), fastest.get((case.name, case.gpus), (float("inf"), ""))
        )
    return [text for _, text in fastest.values()]


def _reached(gain: Interval, target: float) -> str:
    """Say whether a target is reached, as far as the interval tells."""
    if gain.low is None or gain.high is None:
        return "cannot tell"
    return "reached" if gain.low >= target else "not reached" if gain.high < target else "cannot tell"


def _line(case: Case, record: Record, alone: Record | None, failed: list[str]) -> list[str]:
    row: Row = rows_of([record])[0]
    text = renamed(row.recipe)
    recipe = f"`{text}`"
    if row.latency is None:
        failed.append(f"- {case.name} {recipe}: {row.outcome.value}: {row.reason}")
        return []
    gain = gained(alone, record) if alone is not None else None
    is_shared = text == case.recipe
    wished = "-"
    if is_shared and case.target is not None and gain is not None:
        wished = f"{case.target}x: {_reached(gain, case.target)}"
    evidence = record.rounds[0].evidence
    peers = [
        value for name, value in evidence.items() if name.startswith("peer_") and name.endswith("peak_bytes")
    ]
    sent = evidence.get("bytes_exchanged_a_forward")
    cells = [
        case.name,
        recipe,
        str(case.gpus if is_shared else 1),
        plus_minus(row.latency.median),
        ratio(gain) if gain is not None else "1",
        wished,
        size(row.memory.peak_bytes) if row.memory is not None else "-",
        size(max(int(str(peak)) for peak in peers)) if peers else "-",
        size(int(str(sent))) if sent is not None else "-",
        seconds(row.first_call_s) if row.first_call_s is not None else "-",
    ]
    return [f"| {' | '.join(cells)} |"]


def _shortfalls(profiles: Sequence[Profile]) -> list[str]:
    """Break down, a line per recipe, what a step on N GPUs takes beyond an Nth of the time on one."""
    alone: dict[tuple[str, str], Profile] = {}  # the latest so far, which is that of the same run
    lines = []
    for profile in profiles:
        if profile.gpus == 1:
            alone[profile.model, profile.recipe] = profile
            continue
        recipe = renamed(profile.recipe)
        single = alone.get((profile.model, rest_of(recipe)))
        if single is None:
            continue
        beyond = {
            "compute": profile.compute - single.compute / profile.gpus,
            "communication and waiting": profile.communication + profile.waiting,
            "idle": profile.idle - single.idle / profile.gpus,
        }
        parts = ", ".join(f"{figure:.1f} ms {what}" for what, figure in beyond.items())
        lines.append(
            f"- {profile.model} `{recipe}`: {profile.step - single.step / profile.gpus:.1f} ms ({parts})."
        )
    if not lines:
        return []
    intro = (
        "What a step on N GPUs takes beyond 1/N of a step on one. Compute can take more than 1/N because smaller "
        "shards fill a GPU less, because overlapped collectives take multiprocessors from matmuls, and because some "
        "work is replicated:\n"
    )
    return [intro, *lines]


def _profiles(record: Path) -> list[str]:
    profiles = read_profiles(record)
    if not profiles:
        return []
    with_copies = any(COPIES in profile.recipe for profile in profiles)
    copies = f"; with `{COPIES}` the copies, and the barriers before them"
    lines = [
        "## Where the time of a step goes\n",
        "On the first GPU, by torch.profiler.\n",
        "- *Compute*: its own kernels; on N GPUs at best 1/N of those on one.",
        "- *Communication*: collectives that overlap with no compute, each counted as long as the fastest of its kind "
        f"(NCCL's kernels{copies if with_copies else ''}).",
        "- *Waiting*: what those collectives took beyond that, for another GPU or because there was more to send.",
        "- *Idle*: nothing ran. *Launching*: the part of it in which the CPU was busy launching kernels.",
        "- *CPU*: from the start of a step to the start of the next, without waiting for the GPU. If it is as long as "
        "the step, the CPU is the bottleneck.\n",
        *markdown_lines(_PROFILE, ()),
    ]
    for profile in profiles:
        figures = (
            profile.step,
            profile.compute,
            profile.communication,
            profile.waiting,
            profile.idle,
            profile.launch,
            profile.cpu,
        )
        times = " | ".join(f"{figure:.1f} ms" for figure in figures)
        lines.append(f"| {profile.model} | `{renamed(profile.recipe)}` | {profile.gpus} | {times} |")
    lines += ["", *_shortfalls(profiles)]
    made = f"Made by `python -m benchmarks.several_gpus --profile` ([record](../results/{profile_file(record).name}))."
    return [*lines, "", made, ""]
