"""`vivace study`: runs, resumes, and shows published beside measured in every format."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests.typed import run_vivace as vivace
from vivace.evidence.studies import StudyRun, read_study
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.runs import MeasuredPart

QUICK = """
title = "Two recipes"
source = "nobody"
published = "cells.csv"
workload = { prompts = ["a red circle"], num_inference_steps = 2 }
timing = { rounds = 1, repeats = 3, max_warmup = 1 }
[[part]]
name = "p"
models = ["tiny-sd"]
stack = [{ row = "VAE", recipe = "tiny_vae" }]
matrix = { a = ["tiny_vae"], b = ["", "tiny_vae"] }
recipes = [{ row = "lost", recipe = "tf32" }]
figures = ["latency", "peak_memory", "sharpness", "clip", "p99"]
[[claim]]
says = "A tiny VAE is faster"
kind = "faster"
rows = ["VAE"]
than = "baseline"
"""
CELLS = """study,table,gpu,model,row,recipe,metric,unit,value,note
x,t,A100,tiny-sd,baseline,baseline,latency,s,1.0,
x,t,A100,tiny-sd,VAE,tiny_vae,latency,s,0.5,<b>half</b>
x,t,A100,tiny-sd,lost,tf32,latency,s,,not in the source
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "own.toml").write_text(QUICK)
    (folder / "cells.csv").write_text(CELLS)
    return folder


@pytest.fixture(scope="module")
def printed(folder: Path) -> str:
    """The first run's table; the lost recipe makes the exit code 4."""
    return vivace(folder, "study", "own.toml", "--store", "s", "-o", "page.html", code=4).stdout


def test_published_and_measured_stand_side_by_side(printed: str) -> None:
    assert "A100" in printed
    assert "1.00 s" in printed
    assert "0.500 s 2.00x" in printed
    text = " ".join(printed.split())
    assert "lost unsupported: tf32: TF32 is a mode of NVIDIA's tensor cores" in text
    assert "tiny_vae+tiny_vae refused: tiny_vae and tiny_vae both set the" in text
    assert "A tiny VAE is faster" in text


def test_the_same_command_resumes(folder: Path, printed: str) -> None:
    again = vivace(folder, "study", "own.toml", "--store", "s", code=4)
    assert "3 already measured" in again.stderr
    assert again.stdout == printed.removesuffix("page.html\n")


def test_json_and_csv_have_every_cell(folder: Path, printed: str) -> None:
    out = vivace(folder, "study", "own.toml", "--store", "s", "--format", "csv", code=4).stdout
    rows = list(csv.DictReader(io.StringIO(out)))
    keys = {(r["row"], r["figure"], r["kind"]) for r in rows}
    labels = {"baseline", "VAE", "lost", "tiny_vae", "tiny_vae+tiny_vae"}
    figures = {"latency", "peak_memory", "sharpness", "clip", "p99"}
    assert keys == {
        (row, figure, kind) for row in labels for figure in figures for kind in ("published", "measured")
    }
    by_key = {(r["row"], r["figure"], r["kind"]): r for r in rows}
    assert by_key["lost", "latency", "measured"]["outcome"] == "unsupported"
    assert by_key["tiny_vae+tiny_vae", "latency", "measured"]["outcome"] == "refused"
    assert by_key["baseline", "p99", "measured"]["note"] == "it needs 200 timed calls"
    vae = by_key["VAE", "latency", "published"]
    here = float(by_key["VAE", "latency", "measured"]["value"])
    assert float(vae["measured_over_published"]) == pytest.approx(here / 0.5)
    assert float(by_key["VAE", "clip", "measured"]["value"]) < 1

    answer = json.loads(
        vivace(folder, "study", "own.toml", "--store", "s", "--format", "json", code=4).stdout
    )
    assert len(answer["cells"]) == len(rows)
    (claim,) = answer["claims"]
    assert claim["judged"][0]["said"] == "agrees"
    assert answer["gains"][0]["member"] == "tiny_vae"
    assert answer["gains"][0]["speedup"]["ratio"] > 0


def test_the_page_is_offline_and_escapes_what_the_file_says(folder: Path, printed: str) -> None:
    page = (folder / "page.html").read_text()
    assert "&lt;b&gt;half&lt;/b&gt;" in page
    assert "<b>half</b>" not in page
    assert "default-src 'none'" in page
    assert page.count("<script") == 1, "the sorting of tables"
    assert page.count("data:image/") >= 3  # the measured rows' images
    assert "unsupported" in page


def test_a_dry_run_measures_nothing(folder: Path) -> None:
    before = vivace(folder, "study", "own.toml", "--store", "none", "--dry-run", "--no-plan").stdout
    assert "3 trials, 3 rounds to run; the time of 3 is unknown" in before
    assert not (folder / "none").exists()


def test_a_dry_run_says_a_wrong_name_before_it_predicts(tmp_path: Path) -> None:
    part = '[[part]]\nname = "{0}"\nmodels = ["{0}"]\nrecipes = ["bf16"]\n'
    (tmp_path / "x.toml").write_text('title = "T"\n' + part.format("tiny-sd") + part.format("tiny-sdd"))
    done = vivace(tmp_path, "study", "x.toml", "--dry-run", code=2)
    assert done.stderr.startswith("vivace: no model 'tiny-sdd'; did you mean 'tiny-sd'?"), (
        "nothing was predicted"
    )


@pytest.mark.parametrize("name", ["000", "001", "002", "003", "004"])
def test_the_published_studies_run_dry(name: str, tmp_path: Path) -> None:
    full = json.loads(vivace(tmp_path, "study", name, "--dry-run", "--no-plan", "--format", "json").stdout)
    tiny = json.loads(vivace(tmp_path, "study", name, "--dry-run", "--tiny", "--format", "json").stdout)
    assert all(line["refused"] is None for line in (*full, *tiny))
    assert {line["measured_on"] for line in tiny} <= {"tiny-sd", "tiny-flux", "tiny-flux-schnell"}
    assert len(tiny) <= len(full)
    if name == "000":  # the committed records have FLUX.1 [dev]'s ten configurations
        of_flux = [line for line in full if line["model"] == "flux-dev"]
        assert all(line["call_s"] > 1 and line["time_from"] == "record of NVIDIA H200" for line in of_flux)
    assert all(line["call_s"] for line in full), "roughly the baseline's where no record has the recipe"


def test_the_list_names_the_five(tmp_path: Path) -> None:
    out = vivace(tmp_path, "study").stdout
    assert [line[:3] for line in out.splitlines() if line[:1] == "0"] == ["000", "001", "002", "003", "004"]


def test_published_numbers_are_judged_by_all_models_whatever_was_run() -> None:
    """Full optimisation is the fastest on some models of 000 and not on others."""
    file = read_study("000")
    (planned,) = expand(file, models=["flux-dev"])
    by_claim = {
        claim.says: verdicts for claim, verdicts in StudyRun(file, Path(), (MeasuredPart(planned),)).claims()
    }
    (h100,) = by_claim["Full optimisation is the fastest of all ten on an H100"]
    assert h100.verdict.value == "does not"
    assert h100.because.startswith("holds in ")
