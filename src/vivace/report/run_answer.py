"""A comparison as an answer: the table of its recipes, charts, images, and all that was measured beside."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from vivace.answers.answer import Answer, Cell, Column, Fact, Facts, File, Look, Row, Section, Table
from vivace.answers.data import csv_text
from vivace.answers.formatting import (
    between_s,
    count,
    date,
    file_stem,
    money,
    plus_minus,
    ratio,
    seconds,
    size,
)
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.workload import Workload
from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.foundation.untrusted.streams import lines_of
from vivace.report.csv_rows import csv_row
from vivace.report.fidelity import Fidelity
from vivace.report.quality_gate import broken_images
from vivace.report.rows import Row as MeasuredRow
from vivace.report.rows import shared_warnings
from vivace.report.run_charts import charts_of
from vivace.report.run_images import ReadImage, image_grid, no_images
from vivace.report.summary import clip_kept, fastest, fidelity, headline, noise_floor, paid_back, particulars
from vivace.report.usage import usage_table

_PROMPTS_FILE = "prompts.txt"
_MOST_PROMPTS = 500  # that a page shows
_VERDICTS = (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)
_GATES = (Gate.PASSED, Gate.UNCLEAR, Gate.FAILED)
_COLUMNS = (
    Column("recipe", is_text=True),
    Column("s/image"),
    Column("speed-up"),
    Column("verdict", is_text=True),
    Column("quality", is_text=True, rank=1),
    Column("cost of 1,000", rank=1),
    Column("SSIM", rank=5, where="text"),
    Column("PSNR dB, worst", rank=4, where="text"),
    Column("CLIP kept", rank=3, where="text"),
    Column("outside mask", rank=2, where="text"),
    Column("like source", rank=4, where="text"),
    Column("s/step", rank=6, where="text"),
    Column("steps", rank=7, where="text"),
    Column("vae", rank=8, where="text"),
    Column("GPU busy", rank=3, where="text"),
    Column("model memory", rank=5, where="text"),
    Column("peak memory", rank=2),
    Column("first call", rank=4),
    Column("n", rank=9),
)
_NONE = Cell("-")


def answer_of(
    rows: Sequence[MeasuredRow],
    *,
    command: str = "bench",
    read: ReadImage = no_images,
    reproduce: str = "",
    started_at: str = "",
) -> Answer:
    """Return the answer of a comparison.

    Args:
        rows: the baseline first.
        command: the one that answers.
        read: returns an image by its sha256, or the reason why there is none.
        reproduce: the command line that measured it.
    """
    record = rows[0].record
    when = [date(started_at)] if started_at else []
    plain_rows = [csv_row(row) for row in rows]
    prompts = record.trial.workload.prompts
    has_file = all(map(_is_line, prompts))
    return Answer(
        command=command,
        headline=headline(rows),
        data=[row.to_json() for row in rows],
        table=plain_rows,
        verdict=_verdict_of(rows),
        about=(title_of(record), " · ".join([_workload(rows), *when])),
        paragraphs=(" ".join(particulars(rows)),),
        sections=(
            Section("", (results_table(rows),)),
            Section("", tuple(_remarks(rows)), where="page"),
            Section("Charts", tuple(charts_of(rows)), where="page"),
            Section("Images", tuple(grid for grid in (image_grid(rows, read),) if grid), where="page"),
            *_details(rows),
            *_conditions(rows, has_file=has_file),
        ),
        notes=tuple(_cautions(rows)),
        reproduce=reproduce,
        files=(
            File(f"{_stem(rows, started_at)}.csv", csv_text(plain_rows)),
            File(f"{_stem(rows, started_at)}.json", json.dumps([row.to_json() for row in rows]) + "\n"),
            *((File(_PROMPTS_FILE, "".join(f"{prompt}\n" for prompt in prompts)),) if has_file else ()),
        ),
        explains=True,
    )


def _verdict_of(rows: Sequence[MeasuredRow]) -> str:
    best = fastest(rows)
    return "" if best is None else best.recipe


def title_of(record: Record) -> str:
    """Return what a comparison's rows have in common: the model, the device, and its place if there are several."""
    environment, workload = record.environment, record.trial.workload
    place = f", {environment.place.name}" if environment.place is not None else ""
    batch = f", batch {workload.batch}" if workload.batch > 1 else ""
    return f"{record.trial.model.name}{batch} on {environment.device_name}{place}"


def _stem(rows: Sequence[MeasuredRow], started_at: str) -> str:
    """Return the name of the files to save, e.g. "vivace-tiny-sd-batch-2-2026-01-31"."""
    batch = rows[0].record.trial.workload.batch
    parts = ["vivace", rows[0].model, *([f"batch {batch}"] if batch > 1 else []), started_at[:10]]
    return file_stem(" ".join(parts))


def results_table(rows: Sequence[MeasuredRow]) -> Table:
    """Return the table of a comparison, the baseline first; terminals leave out what they have no room for."""
    shared, doubts = shared_warnings(rows), _shared_doubts(rows)
    return Table(
        _COLUMNS,
        tuple(Row(_cells(row, rows[0]), _notes(row, shared, doubts), _look(row)) for row in rows),
        is_code=True,
        is_sorted=True,
    )


def _look(row: MeasuredRow) -> Look:
    return "open" if row.latency is None else "bad" if row.failed_quality else ""


def _cells(row: MeasuredRow, baseline: MeasuredRow) -> tuple[Cell, ...]:
    tag = "" if row.record.trial.recipe.same_picture else "changes the image"
    name = Cell(row.name, below=tag)
    if row.latency is None:
        outcome = Cell(row.outcome.value, main=row.outcome.value.replace("_", " "), value=9)
        return (name, _NONE, _NONE, outcome, *[_NONE] * (len(_COLUMNS) - 4))
    median, figures = row.latency.median, row.fidelity
    between = between_s(median) or "no interval: fewer than 3 calls"
    speed = row.speedup
    speedup = Cell("1", value=1.0) if row.is_baseline else _NONE
    if speed is not None:
        ends = "no interval" if speed.low is None else f"{speed.low:.2f} to {speed.high:.2f}"
        speedup = Cell(ratio(speed), f"{speed.point:.2f}×", ends, speed.point)
    return (
        name,
        Cell(plus_minus(median), seconds(median.point), between, median.point),
        speedup,
        _verdict(row),
        _quality(row, baseline),
        _NONE if row.cost_per_1000 is None else Cell(money(row.cost_per_1000), value=row.cost_per_1000),
        _NONE
        if figures is None or figures.ssim is None or row.is_baseline
        else Cell(f"{figures.ssim.point:.3f}"),
        Cell(fidelity(row) or "-"),
        Cell(clip_kept(row) or "-"),
        _figure(None if figures is None else figures.outside_psnr_db, " dB"),
        _figure(None if figures is None else figures.source_similarity),
        _seconds(row.step_s),
        _seconds(row.stages_s.get("steps")),
        _seconds(row.stages_s.get("vae")),
        _seconds(row.gpu_busy_s),
        Cell(size(row.memory.model_bytes)) if row.memory else _NONE,
        Cell(size(row.memory.peak_bytes), "", f"model {size(row.memory.model_bytes)}", row.memory.peak_bytes)
        if row.memory
        else _NONE,
        _NONE
        if row.first_call_s is None
        else Cell(
            seconds(row.first_call_s),
            below="" if row.load_s is None else f"load {seconds(row.load_s)}",
            value=row.first_call_s,
        ),
        Cell(str(row.latency.n), value=row.latency.n),
    )


def _figure(interval: Interval | None, unit: str = "") -> Cell:
    return Cell(f"{interval.point:.1f}{unit}") if interval else _NONE


def _seconds(value: float | None) -> Cell:
    return _NONE if value is None else Cell(seconds(value))


def _verdict(row: MeasuredRow) -> Cell:
    """Return a verdict, which sorts from faster to slower, failed quality last."""
    if row.failed_quality:
        return Cell(row.outcome.value, main="failed quality", value=len(_VERDICTS) + 1, look="bad")
    if row.verdict is None:
        return Cell("baseline" if row.is_baseline else "-", value=len(_VERDICTS), look="open")
    looks: dict[Verdict, Look] = {Verdict.FASTER: "good", Verdict.SLOWER: "strong"}
    return Cell(row.verdict.value, value=_VERDICTS.index(row.verdict), look=looks.get(row.verdict, "open"))


def _quality(row: MeasuredRow, baseline: MeasuredRow) -> Cell:
    if row.judgement is None:
        return _NONE
    gate = row.judgement.gate
    looks: dict[Gate, Look] = {Gate.FAILED: "bad", Gate.UNCLEAR: "open"}
    return Cell(gate.value, "", _evidence(row, baseline), _GATES.index(gate), looks.get(gate, ""))


def _notes(row: MeasuredRow, shared: Sequence[str], doubts: dict[str, list[int]]) -> tuple[str, ...]:
    """Return the reason, the compile time and the warnings of a row; not what several rows share."""
    notes = [row.reason] if row.reason else []
    if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
        notes += [] if row.judgement.reason in doubts else [f"quality unclear: {row.judgement.reason}"]
    notes += [paid] if (paid := paid_back(row)) else []
    return (*notes, *(warning for warning in row.warnings if warning not in shared))


def _cautions(rows: Sequence[MeasuredRow]) -> list[str]:
    """Return what to know before quoting a figure, and what several rows share."""
    cautions = [f"all rows: {warning}" for warning in shared_warnings(rows)]
    for reason, numbers in _shared_doubts(rows).items():
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        cautions.append(f"the quality of rows {listed} is unclear: {reason}")
    if floor := noise_floor(rows[0]):
        cautions.append(floor)
    if rows[0].model.startswith("tiny-"):
        cautions.append("timings of this small model say nothing about SDXL or FLUX")
    return cautions


def _remarks(rows: Sequence[MeasuredRow]) -> list[str]:
    """Return the quality limits, and what the memory figures mean."""
    remarks = []
    if any(row.judgement is not None for row in rows[1:]):
        remarks.append(_limits(rows[0]))
    memories = [row.memory for row in rows if row.memory is not None]
    if memories and rows[0].record.environment.device == "cpu":
        before = size(max(memory.before_bytes for memory in memories))
        remarks.append(
            "Memory is the process's resident set, including Python and its libraries: "
            f"{before} were in use before the model was loaded."
        )
    elif memories:
        remarks.append("Memory is what PyTorch allocated on the device; the CUDA context takes some more.")
    return remarks


def _details(rows: Sequence[MeasuredRow]) -> list[Section]:
    """Return what a page folds: all figures of the images, the use of the device, what was changed and seen."""
    labelled = [(row.recipe, row) for row in rows if row.latency is not None]
    return [
        Section("All image figures", (_figures_table(rows),), where="page", is_folded=True),
        Section("Limit, energy and cost", (usage_table(labelled),), where="page", is_folded=True),
        Section(
            "Changes made and evidence recorded",
            tuple(Facts(tuple(_effects(row)), row.recipe) for row in rows),
            where="page",
            is_folded=True,
        ),
    ]


def _effects(row: MeasuredRow) -> list[Fact]:
    changed = [
        Fact(name, ", ".join(f"{key} {value}" for key, value in changes.items()))
        for name, changes in row.effects.items()
    ]
    seen = [
        Fact(
            name.replace("_", " "),
            "; ".join(map(str, found)) if isinstance(found, list | tuple) else str(found),
        )
        for name, found in row.record.rounds[0].evidence.items()
    ]
    return changed + seen


def _conditions(rows: Sequence[MeasuredRow], *, has_file: bool) -> list[Section]:
    """Return how to measure these rows again, their prompts, and the machine."""
    prompts = rows[0].record.trial.workload.prompts
    again = _command(rows, _PROMPTS_FILE) if has_file else ""
    commands = (Fact("written out", again, is_command=True),) if again else ()
    listed = [Fact(str(number), prompt) for number, prompt in enumerate(prompts[:_MOST_PROMPTS], 1)]
    title = count(len(prompts), "prompt")
    return [
        Section(title, (Facts(tuple(listed)),), where="page", is_folded=True),
        Section("Conditions", (Facts((*commands, *_facts(rows[0]))),), where="page"),
    ]


def _figures_table(rows: Sequence[MeasuredRow]) -> Table:
    """Return all figures of the quality pass, without columns that are empty for all recipes."""
    cells = [(row, _figure_cells(row.fidelity, row.is_baseline)) for row in rows if row.fidelity is not None]
    headings = [name for name in (cells[0][1] if cells else ()) if any(of[name] != "–" for _, of in cells)]
    lines = [(row.recipe, *(of[name] for name in headings)) for row, of in cells] if headings else []
    note = (
        "Means over all images; in brackets the change against the baseline, or a 95 % interval. PSNR covers only "
        "images that differ."
    )
    return Table.of(("recipe", *headings), lines, is_code=True, note=note)


def _shared_doubts(rows: Sequence[MeasuredRow]) -> dict[str, list[int]]:
    """Return the reasons for unclear quality that several rows share, with the numbers of those rows."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
            numbers.setdefault(row.judgement.reason, []).append(number)
    return {reason: numbers for reason, numbers in numbers.items() if len(numbers) > 1}


def _evidence(row: MeasuredRow, baseline: MeasuredRow) -> str:
    """Return short evidence for the verdict on quality: "match 0.994", "CLIP kept 97 % [95, 99]"."""
    fidelity, limits = row.fidelity, row.limits
    if broken_images(row.record, baseline.record) is not None:
        return "broken images"
    if fidelity is None:
        return ""
    if fidelity.num_identical == fidelity.num_pictures:
        return "identical"
    parts = []
    if limits.clip is not None:
        parts.append(
            "no CLIP score" if fidelity.clip_kept is None else f"CLIP kept {_percent(fidelity.clip_kept)}"
        )
    if fidelity.witness is not None and limits.witness is not None:
        parts.append(f"second witness {_percent(fidelity.witness.mean)}")
    if row.record.trial.recipe.same_picture:
        if fidelity.match is not None and limits.match is not None:
            parts.append(f"match {fidelity.match.mean.point:.3f}")
        if fidelity.ssim is not None and limits.ssim is not None:
            parts.append(f"SSIM {fidelity.ssim.point:.3f}")
        if fidelity.psnr_db is not None and limits.psnr_db is not None:
            parts.append(f"PSNR {fidelity.psnr_db.point:.1f} dB")
    return ", ".join(parts)


def _limits(baseline: MeasuredRow) -> str:
    limits = baseline.limits
    minimums = [
        f"a mean {text}"
        for limit, text in (
            (limits.match, f"match of at least {limits.match:g}" if limits.match else ""),
            (limits.ssim, f"SSIM of at least {limits.ssim}"),
            (limits.psnr_db, f"PSNR of at least {limits.psnr_db} dB"),
        )
        if limit is not None
    ]
    clip = (
        f"Quality passes with {100 * limits.clip:g} % of the baseline’s CLIP margin"
        if isinstance(limits.clip, float)
        else "There is no limit on the CLIP margin"
    )
    listed = " and ".join([", ".join(minimums[:-1]), minimums[-1]] if len(minimums) > 1 else minimums)
    same = f"; recipes that should give the same image also need {listed}" if minimums else ""
    return f"{clip}{same}. Any recipe fails with a black or noisy image, or with many flat images."


def _figure_cells(fidelity: Fidelity, is_baseline: bool) -> dict[str, str]:
    """Return means by heading; no-reference figures with their change against the baseline."""
    missing = "–"

    def mean(interval: Interval | None, digits: int) -> str:
        return missing if is_baseline or interval is None else f"{interval.point:.{digits}f}"

    cells = {
        "identical": missing if is_baseline else f"{fidelity.num_identical} of {fidelity.num_pictures}",
        "match": mean(None if fidelity.match is None else fidelity.match.mean, 3),
        "SSIM": mean(fidelity.ssim, 3),
        "PSNR, worst": missing
        if fidelity.psnr_db is None or is_baseline
        else f"{fidelity.psnr_db.point:.1f}, {fidelity.worst_psnr_db:.1f} dB",
        "LPIPS": mean(fidelity.lpips, 3),
        "CLIP kept": missing if fidelity.clip_kept is None or is_baseline else _percent(fidelity.clip_kept),
        "second witness": missing
        if fidelity.witness is None or is_baseline
        else _percent(fidelity.witness.mean),
        "CLIP similarity": mean(fidelity.clip_similarity, 1),
    }
    for name, heading, digits in (
        ("clip_score", "CLIP score", 1),
        ("sharpness", "sharpness", 0),
        ("colourfulness", "colourfulness", 1),
        ("entropy_bits", "entropy, bits", 2),
    ):
        compared = fidelity.alone.get(name)
        cells[heading] = missing if compared is None else f"{compared.mean:.{digits}f}"
        if compared is not None and not is_baseline:
            change = round(compared.difference.point, digits) + 0.0  # no "−0.0"
            cells[heading] += f" ({change:+.{digits}f})".replace("-", "−")
    return cells


def _percent(interval: Interval) -> str:
    """Format a share, e.g. "97 % [95, 99]", breakable only before the bracket."""
    text = f"{100 * interval.point:.0f}\u00a0%"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:.0f},\u00a0{100 * interval.high:.0f}]"


def _workload(rows: Sequence[MeasuredRow]) -> str:
    workload = rows[0].record.trial.workload
    counts = [r.latency.n for r in rows if r.latency is not None]
    parts = [
        f"{count(len(workload.prompts), 'prompt')} × {count(len(workload.seeds), 'seed')}",
        f"{workload.width} × {workload.height} px",
        count(workload.num_inference_steps, "step"),
        f"guidance {workload.guidance_scale:g}",
        count(max(len(r.record.rounds) for r in rows), "round"),
    ]
    if workload.task != "text":
        parts.insert(0, workload.task_in_words)
    if workload.batch > 1:
        parts.append(f"{workload.batch} images per call")
    if workload.text == "embeddings":
        parts.append("prompts encoded beforehand")
    if workload.text == "repeated":
        parts.append("one prompt repeated")
    if counts:
        low, high = min(counts), max(counts)
        parts.append(count(low, "timed call") if low == high else f"{low} to {high} timed calls")
        parts[-1] += " per recipe"
    return " · ".join(parts)


def _facts(row: MeasuredRow) -> list[Fact]:
    """Return the conditions of the measurement as names and values."""
    trial, environment = row.record.trial, row.record.environment
    device = environment.device_name
    if environment.device_capability:
        device += f", compute capability {environment.device_capability}"
    facts = [("Device", f"{device} ({environment.device})")]
    if environment.place is not None:
        facts.append(("Place", environment.place.name))
    if environment.driver:
        facts.append(("Driver", environment.driver))
    facts += [
        ("CPU", f"{environment.cpu}, {count(environment.num_cores, 'core')}"),
        ("Threads", str(environment.num_threads)),
        ("Memory", size(environment.memory_bytes)),
        ("Platform", environment.platform),
        ("Python", environment.python),
        *environment.libraries.items(),
        *environment.variables.items(),
        (
            "vivace",
            environment.vivace + (f" ({environment.source_revision})" if environment.source_revision else ""),
        ),
        ("Weights", f"{trial.model.name}, {trial.model.source}, {trial.model.revision}"),
    ]
    return [Fact(name, value) for name, value in facts]


def _is_line(prompt: str) -> bool:
    """Whether a file of prompts can hold the prompt: as one line that keeps its spaces."""
    return bool(prompt) and prompt == prompt.strip() and len(lines_of(prompt)) == 1


def _command(rows: Sequence[MeasuredRow], prompts_file: str) -> str:
    """Return the command, an option a line; "" if its seeds do not follow one another."""
    trial, environment = rows[0].record.trial, rows[0].record.environment
    options = _workload_options(trial.workload, prompts_file)
    if options is None:
        return ""
    lines = [
        ["vivace", "bench", "--model", trial.model.name],
        *(["--recipe", row.record.trial.recipe.text] for row in rows),
        *options,
        ["--rounds", str(max(len(row.record.rounds) for row in rows)), "--no-rivals"],
        ["--device", trial.device, "--threads", str(environment.num_threads)],
    ]
    return " \\\n  ".join(shlex.join(line) for line in lines)


def _workload_options(workload: Workload, prompts_file: str) -> list[list[str]] | None:
    first, count = workload.seeds[0], len(workload.seeds)
    if workload.seeds != tuple(range(first, first + count)):
        return None
    options = [
        ["--prompts", prompts_file, "--seed", str(first), "--seeds", str(count)],
        ["--height", str(workload.height), "--width", str(workload.width)],
        [
            "--num-inference-steps",
            str(workload.num_inference_steps),
            "--guidance-scale",
            repr(workload.guidance_scale).removesuffix(".0"),
        ],
    ]
    extra = ["--batch", str(workload.batch)] if workload.batch > 1 else []
    extra += ["--text", workload.text] if workload.text != "prompts" else []
    extra += ["--task", workload.task] if workload.task != "text" else []
    extra += [] if workload.strength is None else ["--strength", f"{workload.strength:g}"]
    return [*options, extra] if extra else options
