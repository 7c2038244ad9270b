"""Draw docs/images/page.png: the top of the page of the README's record, in Chromium.

python -m docgen.page_image              needs chromium or google-chrome
python -m docgen.page_image PAGE.html    writes the page alone

The record holds rows, not rounds. What a page needs and a row does not hold (the images, the CPU time of each call) is
below the image's edge; speed-ups and verdicts are computed again and compared with the record's.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from vivace.answers.page import page_of
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.figures import ImageFigures, QualityPass
from vivace.foundation.spec.record import Outcome, Record, Round, Sample
from vivace.foundation.spec.trial import Model, Trial
from vivace.foundation.spec.workload import Workload
from vivace.recipes.resolve import resolve
from vivace.report import rows_of
from vivace.report.run_answer import answer_of

DOCS = Path(__file__).parents[1] / "docs"
RECORD = DOCS.parent / "results" / "demo-cpu.json"
IMAGE = DOCS / "images" / "page.png"
COMMAND = "vivace demo"
WIDTH, HEIGHT = 1100, 960  # pixels
_COLOURS = 64


def page() -> str:
    """Return the page of the README's record.

    Raises:
        AssertionError: the rows computed from it are not the record's.
    """
    stored = json.loads(RECORD.read_text(encoding="utf-8"))
    figures = [ImageFigures.model_validate(f) for row in stored for f in row["figures"]]
    scorer = next((f.scorer for f in figures), None)
    rows = rows_of([_record(row) for row in stored], QualityPass({f.key: f for f in figures}, scorer))
    for row, stored_row in zip(rows, stored, strict=True):
        row_json = row.to_json()
        assert row_json["speedup"] == stored_row["speedup"], stored_row["recipe"]
        assert (row_json["quality"] or {}).get("verdict") == stored_row["quality"]["verdict"], stored_row[
            "recipe"
        ]
    return page_of(answer_of(rows, command="demo", reproduce=COMMAND))


def _record(row: dict[str, Any]) -> Record:
    workload = Workload.model_validate(row["workload"])
    (samples_s,) = row["latency"]["samples_s"]
    round_ = Round(
        index=0,
        outcome=Outcome.MEASURED,
        started_at="",
        load_s=row["load_s"],
        first_call_s=row["first_call_s"],
        steady=True,
        samples=tuple(
            Sample(
                picture=i,
                total_s=total_s,
                cpu_s=total_s,
                stages_s=row["stages"],
                num_denoiser_calls=row["num_denoiser_calls"],
            )
            for i, total_s in enumerate(samples_s)
        ),
        memory=row["memory"],
        effects=row["effects"],
        evidence=row["evidence"],
        pictures=row["pictures"],
    )
    model = Model(name=row["model"], source=row["source"], revision="")
    environment = Environment.model_validate(row["environment"])
    trial = Trial(
        model=model, recipe=resolve(row["recipe"]).spec, workload=workload, device=environment.device
    )
    return Record(trial=trial, environment=environment, rounds=(round_,))


def draw(browser: str) -> None:
    """Write the image."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "page.html", Path(folder) / "page.png"
        source.write_text(page(), encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += [f"--user-data-dir={folder}/profile", f"--window-size={WIDTH},{HEIGHT}"]
        subprocess.run(
            [browser, *options, f"--screenshot={target}", source.as_uri()], check=True, capture_output=True
        )
        with Image.open(target) as image:
            image.convert("RGB").quantize(_COLOURS).save(IMAGE, optimize=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            sys.exit("no chromium or google-chrome on the PATH; install one of them")
        draw(browser)
        print(IMAGE)
