"""A comparison as an answer: the table of its recipes, charts, images, and all that was measured beside."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Sequence

from vivace.answers.answer import Answer, Cell, Fact, Facts, File, Look, Section, Table, TableColumn, TableRow
from vivace.answers.data import csv_text
from vivace.answers.formatting import (
    between_s,
    count,
    date,
    file_stem,
    list_names,
    money,
    plus_minus,
    ratio,
    seconds,
    size,
)
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.report.csv_rows import csv_row
from vivace.report.fidelity import Fidelity
from vivace.report.rows import Row, shared_warnings
from vivace.report.run_charts import charts_of
from vivace.report.run_images import ReadImage, image_grid, no_images
from vivace.report.summary import clip_kept, fastest, fidelity, headline, noise_floor, paid_back, particulars
from vivace.report.usage import usage_table

_MOST_PROMPTS = 500  # that a page shows
_VERDICTS = (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)
_GATES = (Gate.PASSED, Gate.UNCLEAR, Gate.FAILED)
_LOOKS: dict[Verdict | Gate, Look] = {
    Verdict.FASTER: "good",
    Verdict.SLOWER: "strong",
    Gate.PASSED: "",
    Gate.FAILED: "bad",
}
_NONE = Cell("-")


def answer_of(
    rows: Sequence[Row],
    *,
    command: str = "bench",
    read: ReadImage = no_images,
    reproduce: str = "",
    started_at: str = "",
) -> Answer:
    """Return the answer of a comparison."""
    record, best = rows[0].record, fastest(rows)
    workload, batch = record.trial.workload, record.trial.workload.batch
    plain_rows, data = [csv_row(row) for row in rows], [row.to_json() for row in rows]
    stem = file_stem(
        " ".join(["vivace", rows[0].model, f"batch {batch}" if batch > 1 else "", started_at[:10]])
    )
    grid = image_grid(rows, read)
    prompts = enumerate(workload.prompts[:_MOST_PROMPTS], 1)
    listed_prompts = Facts(tuple(Fact(str(number), prompt) for number, prompt in prompts))
    changes = tuple(Facts(tuple(_effects(row)), row.recipe) for row in rows)
    measured = [(row.recipe, row) for row in rows if row.latency is not None]
    return Answer(
        command=command,
        headline=headline(rows),
        data=data,
        table=plain_rows,
        verdict="" if best is None else best.recipe,
        about=(title_of(record), " · ".join([_workload(rows), *([date(started_at)] if started_at else [])])),
        paragraphs=(" ".join(particulars(rows)),),
        sections=(
            Section("", (results_table(rows),)),
            Section("", tuple(_remarks(rows)), where="page"),
            Section("Charts", tuple(charts_of(rows)), where="page"),
            Section("Images", () if grid is None else (grid,), where="page"),
            Section("All image figures", (_figures_table(rows),), where="page", is_folded=True),
            Section("Limit, energy and cost", (usage_table(measured),), where="page", is_folded=True),
            Section("Changes made and evidence recorded", changes, where="page", is_folded=True),
            Section(count(len(workload.prompts), "prompt"), (listed_prompts,), where="page", is_folded=True),
            Section("Conditions", (Facts(tuple(_conditions(rows[0]))),), where="page"),
        ),
        notes=tuple(_cautions(rows)),
        reproduce=reproduce,
        files=(File(f"{stem}.csv", csv_text(plain_rows)), File(f"{stem}.json", json.dumps(data) + "\n")),
        explains=True,
    )


def title_of(record: Record) -> str:
    """Return what a comparison's rows have in common: the model, the device, and its place if there are several."""
    environment, workload = record.environment, record.trial.workload
    place = f", {environment.place.name}" if environment.place is not None else ""
    batch = f", batch {workload.batch}" if workload.batch > 1 else ""
    return f"{record.trial.model.name}{batch} on {environment.device_name}{place}"


def results_table(rows: Sequence[Row]) -> Table:
    """Return the table of a comparison, the baseline first; terminals leave out what they have no room for."""
    shared, doubts = shared_warnings(rows), _shared_doubts(rows)
    return Table(
        tuple(column for column, _ in _COLUMNS),
        tuple(
            TableRow(
                tuple(_cell(of, row) for _, of in _COLUMNS),
                (*row.describe_skipping(rows[0]), *_notes(row, shared, doubts)),
                "open" if row.latency is None else "bad" if row.failed_quality else "",
            )
            for row in rows
        ),
        is_code=True,
        is_sorted=True,
    )


def _cell(of: Callable[[Row], Cell | str | None], row: Row) -> Cell:
    if row.latency is None and of not in (_name, _verdict):
        return _NONE
    cell = of(row)
    return cell if isinstance(cell, Cell) else Cell(cell or "-")


def _name(row: Row) -> Cell:
    return Cell(row.name, below="" if row.record.trial.recipe.same_picture else "changes the image")


def _time(row: Row) -> Cell:
    assert row.latency is not None
    median = row.latency.median
    between = between_s(median) or "no interval: fewer than 3 calls"
    return Cell(plus_minus(median), seconds(median.point), between, median.point)


def _speedup(row: Row) -> Cell:
    speed = row.speedup
    if speed is None:
        return Cell("1", value=1.0) if row.is_baseline else _NONE
    ends = "no interval" if speed.low is None else f"{speed.low:.2f} to {speed.high:.2f}"
    return Cell(ratio(speed), f"{speed.point:.2f}×", ends, speed.point)


def _verdict(row: Row) -> Cell:
    """Return a verdict, which sorts from faster to slower, failed quality and other outcomes last."""
    if row.latency is None or row.failed_quality:
        value = len(_VERDICTS) + 1 if row.failed_quality else 9
        outcome = row.outcome.value
        return Cell(outcome, outcome.replace("_", " "), value=value, look="bad" if row.failed_quality else "")
    if row.verdict is None:
        return Cell("baseline" if row.is_baseline else "-", value=len(_VERDICTS), look="open")
    return Cell(row.verdict.value, value=_VERDICTS.index(row.verdict), look=_LOOKS.get(row.verdict, "open"))


def _quality(row: Row) -> Cell | None:
    if row.judgement is None:
        return None
    gate, words = row.judgement.gate, row.judgement.words.partition(": ")[2]
    return Cell(gate.value, "", words, _GATES.index(gate), _LOOKS.get(gate, "open"))


def _peak(row: Row) -> Cell | None:
    if row.memory is None:
        return None
    return Cell(
        size(row.memory.peak_bytes), "", f"model {size(row.memory.model_bytes)}", row.memory.peak_bytes
    )


def _first_call(row: Row) -> Cell | None:
    if row.first_call_s is None:
        return None
    below = "" if row.load_s is None else f"load {seconds(row.load_s)}"
    return Cell(seconds(row.first_call_s), below=below, value=row.first_call_s)


def _cost(row: Row) -> Cell | None:
    return None if row.cost_per_1000 is None else Cell(money(row.cost_per_1000), value=row.cost_per_1000)


def _number(row: Row) -> Cell:
    assert row.latency is not None
    return Cell(str(row.latency.n), value=row.latency.n)


def _of_images(name: str, form: str) -> Callable[[Row], str | None]:
    def of(row: Row) -> str | None:
        interval: Interval | None = getattr(row.fidelity, name, None)
        return (
            None if interval is None or (name == "ssim" and row.is_baseline) else form.format(interval.point)
        )

    return of


def _seconds(of: Callable[[Row], float | None]) -> Callable[[Row], str | None]:
    return lambda row: None if (value := of(row)) is None else seconds(value)


_COLUMNS: tuple[tuple[TableColumn, Callable[[Row], Cell | str | None]], ...] = (
    (TableColumn("recipe", is_text=True), _name),
    (TableColumn("s/image"), _time),
    (TableColumn("speed-up"), _speedup),
    (TableColumn("verdict", is_text=True), _verdict),
    (TableColumn("quality", is_text=True, rank=1), _quality),
    (TableColumn("cost of 1,000", rank=1), _cost),
    (TableColumn("SSIM", rank=5, where="text"), _of_images("ssim", "{:.3f}")),
    (TableColumn("PSNR dB, worst", rank=4, where="text"), fidelity),
    (TableColumn("CLIP kept", rank=3, where="text"), clip_kept),
    (TableColumn("outside mask", rank=2, where="text"), _of_images("outside_psnr_db", "{:.1f} dB")),
    (TableColumn("like source", rank=4, where="text"), _of_images("source_similarity", "{:.1f}")),
    (TableColumn("s/step", rank=6, where="text"), _seconds(lambda row: row.step_s)),
    (TableColumn("steps", rank=7, where="text"), _seconds(lambda row: row.stages_s.get("steps"))),
    (TableColumn("vae", rank=8, where="text"), _seconds(lambda row: row.stages_s.get("vae"))),
    (TableColumn("GPU busy", rank=3, where="text"), _seconds(lambda row: row.gpu_busy_s)),
    (
        TableColumn("model memory", rank=5, where="text"),
        lambda row: None if row.memory is None else size(row.memory.model_bytes),
    ),
    (TableColumn("peak memory", rank=2), _peak),
    (TableColumn("first call", rank=4), _first_call),
    (TableColumn("n", rank=9), _number),
)


def _is_doubted(row: Row) -> bool:
    return row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR


def _notes(row: Row, shared: Sequence[str], doubts: dict[str, list[int]]) -> tuple[str, ...]:
    notes = [row.reason] if row.reason else []
    if _is_doubted(row) and row.judgement is not None and row.judgement.reason not in doubts:
        notes += [f"quality unclear: {row.judgement.reason}"]
    notes += [paid] if (paid := paid_back(row)) else []
    return (*notes, *(warning for warning in row.warnings if warning not in shared))


def _cautions(rows: Sequence[Row]) -> list[str]:
    """Return what to know before quoting a figure, and what several rows share."""
    cautions = [f"all rows: {warning}" for warning in shared_warnings(rows)]
    for reason, numbers in _shared_doubts(rows).items():
        cautions.append(f"the quality of rows {list_names([str(n) for n in numbers])} is unclear: {reason}")
    if floor := noise_floor(rows[0]):
        cautions.append(floor)
    changing = [row.recipe for row in rows[1:] if not row.record.trial.recipe.same_picture]
    if rows[0].record.trial.model.is_synthetic and changing:
        model = rows[0].model.removeprefix("synthetic:")
        recipes = [word for recipe in (rows[0].recipe, *changing) for word in ("--recipe", recipe)]
        command = shlex.join(["vivace", "bench", "--model", model, *recipes])
        cautions.append(f"what the images become is judged with the weights, by their owner: {command}")
    if rows[0].model.startswith("tiny-"):
        cautions.append("timings of this small model say nothing about SDXL or FLUX")
    return cautions


def _shared_doubts(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the reasons for unclear quality that several rows share, with the numbers of those rows."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        if _is_doubted(row) and row.judgement is not None:
            numbers.setdefault(row.judgement.reason, []).append(number)
    return {reason: numbers for reason, numbers in numbers.items() if len(numbers) > 1}


def _remarks(rows: Sequence[Row]) -> Iterator[str]:
    if any(row.judgement is not None for row in rows[1:]):
        limits = rows[0].limits
        minimums = [
            f"a mean {name} of at least {limit:g}{unit}"
            for name, limit, unit in (
                ("match", limits.match, ""),
                ("SSIM", limits.ssim, ""),
                ("PSNR", limits.psnr_db, " dB"),
            )
            if limit is not None
        ]
        clip = (
            f"Quality passes with {100 * limits.clip:g} % of the baseline’s CLIP margin"
            if isinstance(limits.clip, float)
            else "There is no limit on the CLIP margin"
        )
        same = (
            f"; recipes that should give the same image also need {list_names(minimums)}" if minimums else ""
        )
        yield f"{clip}{same}. Any recipe fails with a black or noisy image, or with many flat images."
    memories = [row.memory for row in rows if row.memory is not None]
    if memories and rows[0].record.environment.device == "cpu":
        before = size(max(memory.before_bytes for memory in memories))
        yield (
            "Memory is the process's resident set, including Python and its libraries: "
            f"{before} were in use before the model was loaded."
        )
    elif memories:
        yield "Memory is what PyTorch allocated on the device; the CUDA context takes some more."


def _effects(row: Row) -> Iterator[Fact]:
    for name, changes in row.effects.items():
        yield Fact(name, ", ".join(f"{key} {value}" for key, value in changes.items()))
    for name, found in row.record.rounds[0].evidence.items():
        text = "; ".join(map(str, found)) if isinstance(found, list | tuple) else str(found)
        yield Fact(name.replace("_", " "), text)


def _figures_table(rows: Sequence[Row]) -> Table:
    """Return all figures of the quality pass, without columns that are empty for all recipes."""
    cells = [(row, _figure_cells(row.fidelity, row.is_baseline)) for row in rows if row.fidelity is not None]
    headings = [name for name in (cells[0][1] if cells else ()) if any(of[name] != "–" for _, of in cells)]
    lines = [(row.recipe, *(of[name] for name in headings)) for row, of in cells] if headings else []
    note = (
        "Means over all images; in brackets the change against the baseline, or a 95 % interval. PSNR covers only "
        "images that differ."
    )
    return Table.of(("recipe", *headings), lines, is_code=True, note=note)


def _figure_cells(fidelity: Fidelity, is_baseline: bool) -> dict[str, str]:
    """Return means by heading; no-reference figures with their change against the baseline."""
    match, witness = (kept and kept.mean for kept in (fidelity.match, fidelity.witness))
    psnr, kept = fidelity.psnr_db, fidelity.clip_kept
    against = {
        "identical": f"{fidelity.num_identical} of {fidelity.num_pictures}",
        "match": match and f"{match.point:.3f}",
        "SSIM": fidelity.ssim and f"{fidelity.ssim.point:.3f}",
        "PSNR, worst": psnr and f"{psnr.point:.1f}, {fidelity.worst_psnr_db:.1f} dB",
        "LPIPS": fidelity.lpips and f"{fidelity.lpips.point:.3f}",
        "CLIP kept": kept and _percent(kept),
        "second witness": witness and _percent(witness),
        "CLIP similarity": fidelity.clip_similarity and f"{fidelity.clip_similarity.point:.1f}",
    }
    cells = {name: "–" if is_baseline or not text else text for name, text in against.items()}
    for name, heading, digits in (
        ("clip_score", "CLIP score", 1),
        ("sharpness", "sharpness", 0),
        ("colourfulness", "colourfulness", 1),
        ("entropy_bits", "entropy, bits", 2),
    ):
        compared = fidelity.alone.get(name)
        cells[heading] = "–" if compared is None else f"{compared.mean:.{digits}f}"
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


def _workload(rows: Sequence[Row]) -> str:
    workload = rows[0].record.trial.workload
    counts = [r.latency.n for r in rows if r.latency is not None] or [0]
    calls = count(min(counts), "timed call")
    if min(counts) < max(counts):
        calls = f"{min(counts)} to {max(counts)} timed calls"
    texts = {"embeddings": "prompts encoded beforehand", "repeated": "one prompt repeated"}
    parts = [
        "" if workload.task == "text" else workload.task_in_words,
        f"{count(len(workload.prompts), 'prompt')} × {count(len(workload.seeds), 'seed')}",
        f"{workload.width} × {workload.height} px",
        count(workload.num_inference_steps, "step"),
        f"guidance {workload.guidance_scale:g}",
        count(max(len(r.record.rounds) for r in rows), "round"),
        f"{workload.batch} images per call" if workload.batch > 1 else "",
        texts.get(workload.text, ""),
        f"{calls} per recipe" if any(counts) else "",
    ]
    return " · ".join(part for part in parts if part)


def _conditions(row: Row) -> Iterator[Fact]:
    model, of = row.record.trial.model, row.record.environment
    capability = f", compute capability {of.device_capability}" if of.device_capability else ""
    revision = f" ({of.source_revision})" if of.source_revision else ""
    facts = {
        "Device": f"{of.device_name}{capability} ({of.device})",
        "Place": of.place and of.place.name,
        "Driver": of.driver,
        "CPU": f"{of.cpu}, {count(of.num_cores, 'core')}",
        "Threads": str(of.num_threads),
        "Memory": size(of.memory_bytes),
        "Platform": of.platform,
        "Python": of.python,
        **of.libraries,
        **of.variables,
        "vivace": f"{of.vivace}{revision}",
        "Weights": f"{model.name}, {model.source}, {model.revision}",
    }
    return (Fact(name, value) for name, value in facts.items() if value)
