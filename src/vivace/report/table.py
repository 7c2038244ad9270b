"""Render rows as a table for the terminal, or as Markdown, CSV or JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from vivace.answers.formatting import money, plus_minus, ratio, seconds, size, whole_words
from vivace.foundation.stats import Gate
from vivace.report.rows import Row, shared_warnings
from vivace.report.summary import clip_kept, fidelity, paid_back, quality
from vivace.report.text_table import TextTable, csv_text

FORMATS = ("table", "json", "csv", "md")
_COST = "cost of 1,000"
_OUTSIDE, _LIKE = "outside mask", "like source"
_COLUMNS = (
    # heading, rank: where the width does not allow all, those of the highest rank are left out first
    ("recipe", 0),
    ("s/image", 0),
    ("speed-up", 0),
    ("verdict", 0),
    ("quality", 1),
    (_COST, 1),  # only if a price was given
    ("SSIM", 5),
    ("PSNR dB, worst", 4),
    ("CLIP kept", 3),
    (_OUTSIDE, 2),  # only of images that were made from others
    (_LIKE, 4),
    ("s/step", 6),
    ("steps", 7),
    ("vae", 8),
    ("GPU busy", 3),
    ("model memory", 5),
    ("peak memory", 2),
    ("first call", 4),
    ("n", 9),
)
_LEFT = frozenset({"recipe", "verdict", "quality"})
_GAP = 2
_RECIPE_WIDTH = 32
"""Characters reserved for a recipe, if it needs them, before columns are left out."""
_PIPE_WIDTH = 180  # characters, if standard output is a file or a pipe


def render(rows: Sequence[Row], format_: str) -> str:
    """Return the rows as text in one of FORMATS, with a final newline."""
    if format_ == "json":
        return json.dumps([row.to_json() for row in rows], indent=2) + "\n"
    if format_ == "csv":
        return csv_text(_CSV_FIELDS, [csv_row(row) for row in rows])
    if format_ == "md":
        return _markdown(rows)
    out = io.StringIO()
    print_table(rows, Console(file=out, width=_PIPE_WIDTH, color_system=None))
    return out.getvalue()


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the table to a terminal. Recipes break at a plus sign, figures never. Reasons and warnings follow."""
    cells = [_cells(row) for row in rows]
    kept, recipe_width = _fitting([[heading for heading, _ in _COLUMNS], *cells], console.width)
    TextTable(
        tuple(_COLUMNS[i][0] for i in kept),
        [[texts[i] for i in kept] for texts in cells],
        left=_LEFT,
        label_width=recipe_width,
        styles=["dim" if row.latency is None else "red" if row.failed_quality else None for row in rows],
        keeps_figures=True,
    ).print(console)
    shared = shared_warnings(rows)
    for row in rows:
        if note := _note(row, shared):
            console.print(Text(whole_words(f"{row.name}: {note}", console.width)))


def _fitting(cells: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Return the columns with figures that fit a width, in characters, and the width left for the recipe.

    Args:
        cells: the headings, and the cells of each row.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_filled = [any(cell != "-" for cell in column[1:]) for column in zip(*cells, strict=True)]
    columns = [i for i, (_, rank) in enumerate(_COLUMNS) if rank == 0 or is_filled[i]]
    least_width = min(widths[0], _RECIPE_WIDTH)
    while True:
        left = width - sum(widths[i] + _GAP for i in columns[1:]) - _GAP
        ranks = {_COLUMNS[i][1] for i in columns}
        if left >= least_width or ranks == {0}:
            return columns, max(left, len("recipe"))
        columns = [i for i in columns if _COLUMNS[i][1] < max(ranks)]


def _cells(row: Row) -> list[str]:
    if row.latency is None:
        return [row.name, "-", "-", row.outcome.value, *["-"] * (len(_COLUMNS) - 4)]
    figures = row.fidelity
    return [
        row.name,
        plus_minus(row.latency.median),
        "1" if row.is_baseline else ratio(row.speedup) if row.speedup else "-",
        _verdict(row),
        quality(row) or "-",
        "-" if row.cost_per_1000 is None else money(row.cost_per_1000),
        f"{figures.ssim.point:.3f}"
        if figures is not None and figures.ssim is not None and not row.is_baseline
        else "-",
        fidelity(row) or "-",
        clip_kept(row) or "-",
        f"{figures.outside_psnr_db.point:.1f} dB" if figures is not None and figures.outside_psnr_db else "-",
        f"{figures.source_similarity.point:.1f}"
        if figures is not None and figures.source_similarity
        else "-",
        seconds(step) if (step := _step_s(row)) is not None else "-",
        seconds(row.stages_s["steps"]),
        seconds(row.stages_s["vae"]),
        seconds(row.gpu_busy_s) if row.gpu_busy_s is not None else "-",
        size(row.memory.model_bytes) if row.memory else "-",
        size(row.memory.peak_bytes) if row.memory else "-",
        seconds(row.first_call_s) if row.first_call_s is not None else "-",
        str(row.latency.n),
    ]


def _step_s(row: Row) -> float | None:
    """Return the seconds per image of one denoiser call."""
    return row.stages_s["steps"] / row.num_denoiser_calls if row.num_denoiser_calls else None


def _verdict(row: Row) -> str:
    if row.failed_quality:
        return row.outcome.value
    return "baseline" if row.is_baseline else (row.verdict.value if row.verdict else "-")


def _note(row: Row, shared: Sequence[str] = ()) -> str:
    """Return the reason, the compile time and the warnings of a row."""
    notes = [row.reason] if row.reason else []
    if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
        notes.append(f"quality unclear: {row.judgement.reason}")
    if paid := paid_back(row):
        notes.append(paid)
    return "; ".join([*notes, *(w for w in row.warnings if w not in shared)])


def _markdown(rows: Sequence[Row]) -> str:
    empty = {
        _COST: not any(row.cost_per_1000 for row in rows),
        _OUTSIDE: not any(row.fidelity and row.fidelity.outside_psnr_db for row in rows),
        _LIKE: not any(row.fidelity and row.fidelity.source_similarity for row in rows),
    }
    kept = [i for i, (name, _) in enumerate(_COLUMNS) if not empty.get(name)]
    texts = [[*(cells[i] for i in kept), _note(row)] for row in rows for cells in [_cells(row)]]
    table = TextTable((*(_COLUMNS[i][0] for i in kept), "notes"), texts, is_code=True)
    return "\n".join(table.markdown()) + "\n"


_CSV_FIELDS = (
    "model", "source", "recipe", "batch", "height", "width", "num_inference_steps", "guidance_scale", "text", "task",
    "strength", "outcome", "reason", "median_s", "ci95_low_s", "ci95_high_s", "mean_s", "min_s", "max_s", "p90_s",
    "p99_s", "n", "rounds", "speedup", "speedup_low", "speedup_high", "verdict", "quality", "quality_reason",
    "num_pictures", "num_identical", "psnr_db", "worst_psnr_db", "ssim", "match", "clip_score", "clip_kept",
    "clip_kept_low", "clip_kept_high", "witness_kept", "clip_similarity", "outside_psnr_db", "outside_match",
    "source_similarity", "lpips", "sharpness", "colourfulness", "entropy_bits", "text_s", "encode_s", "steps_s",
    "step_s", "vae_s", "other_s", "first_call_s", "compile_fresh_s", "compile_cached_s", "break_even_images", "load_s",
    "model_bytes", "peak_bytes", "weights_bytes", "gpu_busy_s", "limit_s", "limit_share", "lost_to_kernels_s",
    "launch_gaps_s", "outside_components_s", "energy_j", "energy_from", "power_w", "sm_clock_mhz",
    "gpu_temperature_c", "throttled", "cost_per_1000", "cpu_share", "device", "device_name", "gpu_index", "gpu_uuid",
    "host", "warnings",
)  # fmt: skip


def csv_row(row: Row) -> dict[str, object]:
    """Return a row as flat data; fields that it lacks are None."""
    fields = _csv_fields(row)
    return {name: fields.get(name) for name in _CSV_FIELDS}


def _csv_fields(row: Row) -> dict[str, object]:
    environment, workload = row.record.environment, row.record.trial.workload
    sizes = ("batch", "height", "width", "num_inference_steps", "guidance_scale", "text", "task", "strength")
    fields: dict[str, object] = {
        **{name: getattr(workload, name) for name in sizes},
        "model": row.model,
        "source": row.record.trial.model.source,
        "recipe": row.recipe,
        "outcome": row.outcome.value,
        "reason": row.reason,
        "device": environment.device,
        "device_name": environment.device_name,
        "warnings": "; ".join(row.warnings),
        **_csv_place(row),
    }
    if row.latency is None:
        return fields
    fields |= {
        "median_s": row.latency.median.point,
        "ci95_low_s": row.latency.median.low,
        "ci95_high_s": row.latency.median.high,
        "mean_s": row.latency.mean_s,
        "min_s": row.latency.min_s,
        "max_s": row.latency.max_s,
        "p90_s": row.latency.p90_s,
        "p99_s": row.latency.p99_s,
        "n": row.latency.n,
        "rounds": len(row.latency.samples_s),
        "step_s": _step_s(row),
        "gpu_busy_s": row.gpu_busy_s,
        "cpu_share": row.cpu_share,
        "cost_per_1000": row.cost_per_1000,
        "first_call_s": row.first_call_s,
        "load_s": row.load_s,
    }
    if row.gpu is not None:
        fields |= {
            "energy_j": row.gpu.energy_j,
            "energy_from": row.gpu.energy_from,
            "power_w": row.gpu.power_w,
            "sm_clock_mhz": row.gpu.sm_clock_mhz,
            "gpu_temperature_c": row.gpu.max_temperature_c,
            "throttled": ", ".join(row.gpu.throttled),
        }
    if row.limit is not None:
        fields |= {
            "limit_s": row.limit.limit_s,
            "limit_share": row.limit.share,
            "lost_to_kernels_s": row.limit.kernels_s,
            "launch_gaps_s": row.limit.gaps_s,
            "outside_components_s": row.limit.outside_s,
        }
    if row.compilation is not None:
        fields |= {
            "compile_fresh_s": row.compilation.fresh_s,
            "compile_cached_s": row.compilation.cached_s,
            "break_even_images": row.compilation.break_even_images,
        }
    fields |= {f"{stage}_s": value for stage, value in row.stages_s.items()}
    if row.speedup is not None:
        fields |= {
            "speedup": row.speedup.point,
            "speedup_low": row.speedup.low,
            "speedup_high": row.speedup.high,
            "verdict": _verdict(row),
        }
    fields |= _csv_quality(row)
    if row.memory is not None:
        fields |= {
            "model_bytes": row.memory.model_bytes,
            "peak_bytes": row.memory.peak_bytes,
            "weights_bytes": row.memory.weights_bytes,
        }
    return fields


def _csv_place(row: Row) -> dict[str, object]:
    """Return the GPU of a row: the place's, or the one that its rounds reported."""
    place = row.record.environment.place
    if place is not None:
        return {"gpu_index": place.index, "gpu_uuid": place.uuid, "host": place.host}
    conditions = row.record.rounds[0].conditions
    return {"gpu_index": conditions.get("gpu_index"), "gpu_uuid": conditions.get("gpu_uuid")}


_CSV_INTERVALS = (
    "psnr_db", "ssim", "clip_score", "clip_kept", "clip_similarity", "lpips", "outside_psnr_db", "source_similarity"
)  # fmt: skip


def _csv_quality(row: Row) -> dict[str, object]:
    fields: dict[str, object] = {}
    if row.judgement is not None:
        fields |= {"quality": row.judgement.gate.value, "quality_reason": row.judgement.reason}
    if row.fidelity is not None:
        for name in ("num_pictures", "num_identical", "worst_psnr_db"):
            fields[name] = getattr(row.fidelity, name)
        for name in _CSV_INTERVALS:
            interval = getattr(row.fidelity, name)
            fields[name] = None if interval is None else interval.point
        for name in ("sharpness", "colourfulness", "entropy_bits"):
            if name in row.fidelity.alone:
                fields[name] = row.fidelity.alone[name].mean
        kept_shares = {"match": "match", "witness_kept": "witness", "outside_match": "outside"}
        for name, attribute in kept_shares.items():
            share = getattr(row.fidelity, attribute)
            fields[name] = None if share is None else share.mean.point
        kept = row.fidelity.clip_kept
        fields |= {} if kept is None else {"clip_kept_low": kept.low, "clip_kept_high": kept.high}
    return fields
