"""Write what the records under results/ say of full-size models into the package, for `vivace study --dry-run`.

    python -m benchmarks.known_figures            write src/vivace/studies/published/known.csv
    python -m benchmarks.known_figures --check    exit 1 if it is not current

The records are of random weights on a GPU. A row has the time outside of the denoising steps and that of one step,
so that another number of steps can be estimated; a recipe that sets the number itself has none.
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.study_groups import own, record_of
from benchmarks.technique_cases import FAMILIES, RESULTS, record_file
from benchmarks.technique_records import read_records
from vivace.models.find import SYNTHETIC
from vivace.spec.record import Outcome, Record
from vivace.studies.recorded_figures import COLUMNS, KNOWN
from vivace.studies.study_file import published_studies
from vivace.techniques.steps import Steps

FUSED = [RESULTS / f"flux-fused-{name}.json" for name in ("flux-dev", "flux-schnell")]
"""Prompts are encoded before, so these rows lack the text encoders' time: 25 ms of FLUX.1 [dev]'s 5 s."""
TARGET = Path(__file__).parents[1] / "src" / "vivace" / "studies" / "published" / KNOWN


def content() -> str:
    """Return the CSV: the last record of each model, recipe, size and number of steps."""
    found: dict[tuple[object, ...], list[object]] = {}
    for record in _records():
        if (line := _line(record)) is not None:
            found[tuple(line[:6])] = line
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(found.values())
    return out.getvalue()


def _records() -> Iterator[Record]:
    """Yield the records of full-size models; a study's row counts where no other record has it."""
    for name in published_studies():
        for sitting in own(name):
            yield from (record_of(sitting, row) for row in sitting.rows)
    for path in [RESULTS / "every-model.json", *(record_file(name) for name in FAMILIES), *FUSED]:
        yield from read_records(path)


def _line(record: Record) -> list[object] | None:
    workload, device = record.trial.workload, record.environment.device
    if record.outcome is not Outcome.MEASURED or device != "cuda" or workload.batch != 1:
        return None
    samples = [sample for round_ in record.rounds for sample in round_.samples]
    memory = max((r.memory for r in record.rounds if r.memory), key=lambda m: m.peak_bytes)
    steps_s = statistics.median(sample.stages_s["steps"] for sample in samples)
    rest_s = statistics.median(sample.total_s - sample.stages_s["steps"] for sample in samples)
    if any(one.name == Steps.name for one in record.trial.recipe.techniques):
        rest_s, steps_s = rest_s + steps_s, 0.0  # see Known
    return [
        record.trial.model.name.removeprefix(SYNTHETIC),
        record.trial.recipe.text,
        workload.height,
        workload.width,
        workload.num_inference_steps,
        record.environment.device_name,
        f"{rest_s:.4g}",
        f"{steps_s / workload.num_inference_steps:.4g}",
        f"{record.rounds[0].first_call_s or 0:.4g}",
        memory.model_bytes,
        memory.peak_bytes,
    ]


def main() -> int:
    """Write the file, or check it."""
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.read_text() == content() else 1
    TARGET.write_text(content())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
