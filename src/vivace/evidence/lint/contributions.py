"""Files of `vivace contribute` as tables: their format is checked, and their figures as those of any table."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic import ValidationError

from vivace.evidence.lint.file_tables import Table
from vivace.foundation.spec.contribution import FORMAT, ContributedRow, Contribution
from vivace.foundation.spec.input_errors import expectation_of
from vivace.foundation.spec.record import Outcome

KEY = "vivace_contribution"
_CONTRIBUTED_HEADINGS = (
    "recipe", "model", "gpu", "steps", "height", "width", "batch", "mean_s", "min_s", "p50_s", "max_s", "n",
)  # fmt: skip


def read_contribution(content: dict[str, Any]) -> Contribution:
    """Check the content of a contribution.

    Raises:
        ValueError: names the key, and what was wanted.
    """
    number = content.get(KEY)
    if isinstance(number, int) and number > FORMAT:
        raise ValueError(
            f"the key {KEY!r} is {number}, and this version of vivace reads up to {FORMAT}; update vivace"
        )
    try:
        return Contribution.model_validate(content)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"])) or KEY
        raise ValueError(f"the key {key[:120]!r}: {expectation_of(error)}") from None


def contribution_tables(file: Path, content: dict[str, Any]) -> list[Table]:
    """Return a table for each comparison, with seconds per image.

    Raises:
        ValueError: it is not what `vivace contribute` writes.
    """
    tables = []
    for number, contributed in enumerate(read_contribution(content).comparisons, 1):
        table = Table(file, _CONTRIBUTED_HEADINGS, context=f"comparison {number}", unit="row")
        for position, row in enumerate(contributed.rows, 1):
            table.add(position, _cells(row))
        tables.append(table)
    return tables


def _cells(row: ContributedRow) -> list[str]:
    trial, workload = row.record.trial, row.record.trial.workload
    measured = [round_ for round_ in row.record.rounds if round_.outcome is Outcome.MEASURED]
    seconds = [s.total_s / workload.batch for s in chain.from_iterable(r.samples for r in measured)]
    calls = {sample.num_denoiser_calls for round_ in measured for sample in round_.samples}
    times = [fmean(seconds), min(seconds), median(seconds), max(seconds)] if seconds else []
    return [
        trial.recipe.text,
        trial.model.name,
        row.record.environment.device_name,
        # A recipe may have other steps than the workload; then the limit of the chip is another one, too.
        str(workload.num_inference_steps) if calls == {workload.num_inference_steps} else "",
        str(workload.height),
        str(workload.width),
        str(workload.batch),
        *([f"{value:.9g}" for value in times] or [""] * 4),
        str(len(seconds)) if seconds else "",
    ]
