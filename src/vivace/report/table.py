"""Render rows as a table for the terminal, or as Markdown, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vivace.report.rows import Row, shared_warnings
from vivace.report.summary import clip_kept, fidelity, paid_back, plus_minus, quality, ratio, seconds, size
from vivace.stats import Gate

FORMATS = ("table", "json", "csv", "md")
_COLUMNS = (
    # heading, shown on narrow terminals too
    ("recipe", True),
    ("s/image", True),
    ("speed-up", True),
    ("verdict", True),
    ("quality", True),
    ("SSIM", False),
    ("PSNR dB, worst", False),
    ("CLIP kept", False),
    ("steps", False),
    ("vae", False),
    ("peak memory", True),
    ("first call", False),
    ("n", False),
)
_WIDE = 150  # characters; all columns are shown from this width on
_PIPE_WIDTH = 180  # characters, if standard output is a file or a pipe


def render(rows: Sequence[Row], format_: str) -> str:
    """Return the rows as text in one of FORMATS, with a final newline."""
    if format_ == "json":
        return json.dumps([row.to_json() for row in rows], indent=2) + "\n"
    if format_ == "csv":
        return _csv(rows)
    if format_ == "md":
        return _markdown(rows)
    out = io.StringIO()
    print_table(rows, Console(file=out, width=_PIPE_WIDTH, color_system=None))
    return out.getvalue()


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Print the table to a terminal. Recipes wrap, figures never do. Reasons and warnings follow, one line each."""
    shown = [i for i, (_, always) in enumerate(_COLUMNS) if always or console.width >= _WIDE]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i in shown:
        heading = _COLUMNS[i][0]
        left = heading in {"recipe", "verdict", "quality"}
        table.add_column(
            heading, justify="left" if left else "right", no_wrap=heading != "recipe", overflow="fold"
        )
    shared = shared_warnings(rows)
    for row in rows:
        cells = _cells(row)
        style = "dim" if row.latency is None else "red" if row.failed_quality else None
        table.add_row(
            *[Text(cells[i]) for i in shown], style=style
        )  # Text: brackets in a recipe are not rich markup
    console.print(table)
    for row in rows:
        if note := _note(row, shared):
            console.print(Text(f"{row.recipe}: {note}"))


def _cells(row: Row) -> list[str]:
    if row.latency is None:
        return [row.recipe, "-", "-", row.outcome.value, *["-"] * (len(_COLUMNS) - 4)]
    found = row.fidelity
    return [
        row.recipe,
        plus_minus(row.latency.median),
        "1" if row.is_baseline else ratio(row.speedup) if row.speedup else "-",
        _verdict(row),
        quality(row) or "-",
        f"{found.ssim.point:.3f}"
        if found is not None and found.ssim is not None and not row.is_baseline
        else "-",
        fidelity(row) or "-",
        clip_kept(row) or "-",
        seconds(row.stages_s["steps"]),
        seconds(row.stages_s["vae"]),
        size(row.memory.peak_bytes) if row.memory else "-",
        seconds(row.first_call_s) if row.first_call_s is not None else "-",
        str(row.latency.n),
    ]


def _verdict(row: Row) -> str:
    if row.failed_quality:
        return row.outcome.value
    return "baseline" if row.is_baseline else (row.verdict.value if row.verdict else "-")


def _note(row: Row, shared: Sequence[str] = ()) -> str:
    """Return the reason, the compile time and the warnings of a row."""
    said = [row.reason] if row.reason else []
    if row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
        said.append(f"quality unclear: {row.judgement.reason}")
    if paid := paid_back(row):
        said.append(paid)
    return "; ".join([*said, *(w for w in row.warnings if w not in shared)])


def _markdown(rows: Sequence[Row]) -> str:
    headings = [heading for heading, _ in _COLUMNS] + ["notes"]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in rows:
        cells = [cell.replace("|", "\\|").replace("\n", " ") for cell in [*_cells(row), _note(row)]]
        cells[0] = f"`{cells[0]}`"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_CSV_FIELDS = (
    "model", "source", "recipe", "outcome", "reason", "median_s", "ci95_low_s", "ci95_high_s", "mean_s", "min_s",
    "max_s", "n", "speedup", "speedup_low", "speedup_high", "verdict", "quality", "quality_reason", "num_pictures",
    "num_identical", "psnr_db", "worst_psnr_db", "ssim", "match", "clip_score", "clip_kept", "clip_kept_low",
    "clip_kept_high", "witness_kept", "clip_similarity", "lpips", "sharpness", "colourfulness", "entropy_bits",
    "text_s", "steps_s", "vae_s", "other_s", "first_call_s", "compile_fresh_s", "compile_cached_s",
    "break_even_images", "load_s", "model_bytes", "peak_bytes", "weights_bytes", "device", "device_name",
    "warnings",
)  # fmt: skip


def _csv(rows: Sequence[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, _CSV_FIELDS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(_csv_row(row))
    return out.getvalue()


def _csv_row(row: Row) -> dict[str, object]:
    environment = row.record.environment
    found: dict[str, object] = {
        "model": row.model,
        "source": row.record.trial.model.source,
        "recipe": row.recipe,
        "outcome": row.outcome.value,
        "reason": row.reason,
        "device": environment.device,
        "device_name": environment.device_name,
        "warnings": "; ".join(row.warnings),
    }
    if row.latency is None:
        return found
    found |= {
        "median_s": row.latency.median.point,
        "ci95_low_s": row.latency.median.low,
        "ci95_high_s": row.latency.median.high,
        "mean_s": row.latency.mean_s,
        "min_s": row.latency.min_s,
        "max_s": row.latency.max_s,
        "n": row.latency.n,
        "first_call_s": row.first_call_s,
        "load_s": row.load_s,
    }
    if row.compilation is not None:
        found |= {
            "compile_fresh_s": row.compilation.fresh_s,
            "compile_cached_s": row.compilation.cached_s,
            "break_even_images": row.compilation.break_even_images,
        }
    found |= {f"{stage}_s": value for stage, value in row.stages_s.items()}
    if row.speedup is not None:
        found |= {
            "speedup": row.speedup.point,
            "speedup_low": row.speedup.low,
            "speedup_high": row.speedup.high,
            "verdict": row.verdict.value if row.verdict else None,
        }
    found |= _csv_quality(row)
    if row.memory is not None:
        found |= {
            "model_bytes": row.memory.model_bytes,
            "peak_bytes": row.memory.peak_bytes,
            "weights_bytes": row.memory.weights_bytes,
        }
    return found


def _csv_quality(row: Row) -> dict[str, object]:
    found: dict[str, object] = {}
    if row.judgement is not None:
        found |= {"quality": row.judgement.gate.value, "quality_reason": row.judgement.reason}
    if row.fidelity is not None:
        for name in ("num_pictures", "num_identical", "worst_psnr_db"):
            found[name] = getattr(row.fidelity, name)
        for name in ("psnr_db", "ssim", "clip_score", "clip_kept", "clip_similarity", "lpips"):
            interval = getattr(row.fidelity, name)
            found[name] = None if interval is None else interval.point
        for name in ("sharpness", "colourfulness", "entropy_bits"):
            if name in row.fidelity.alone:
                found[name] = row.fidelity.alone[name].mean
        for name, share in (("match", row.fidelity.match), ("witness_kept", row.fidelity.witness)):
            found[name] = None if share is None else share.mean.point
        kept = row.fidelity.clip_kept
        found |= {} if kept is None else {"clip_kept_low": kept.low, "clip_kept_high": kept.high}
    return found
