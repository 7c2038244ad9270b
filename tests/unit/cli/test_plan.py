"""vivace plan, in the test's own process."""

import json
import re
import shlex
from subprocess import CompletedProcess

import click
import pytest

from tests.typed import Run
from vivace.cli import app
from vivace.techniques import offload


def lines_of(done: CompletedProcess[str]) -> list[str]:
    return done.stdout.replace("\\\n", " ").splitlines()


def test_a_recipe_is_answered_in_eight_lines_and_why_has_the_rest(run: Run) -> None:
    recipe = ("tiny-sd", "--recipe", "tiny_vae+parallel(cfg)", "--card", "8")
    lines = lines_of(run("plan", *recipe))
    assert len(lines) <= 8
    assert lines[0] == "tiny-sd on a card of 8 GB: fits with this recipe"
    longer = lines_of(run("plan", *recipe, "--why"))
    shortened = [line.removesuffix("; --why says more") for line in lines]
    assert [line.split() for line in longer[: len(lines)]] == [line.split() for line in shortened]
    output = " ".join(" ".join(longer).split())
    assert "predicted without loading" in output
    assert "AutoencoderTiny" in output
    assert "cards of 8, 12, 16, 24, 40, 48, 80, 141 GB, with 1.20 GB reserved" in output
    assert "on the other GPU, for the denoiser" in output


def test_json_has_components_and_changes(run: Run) -> None:
    answer = json.loads(run("plan", "tiny-sd", "--card", "1.25", "--json").stdout)
    unet = next(c for c in answer["components"] if c["name"] == "unet")
    assert unet["num_parameters"] == pytest.approx(4.8e6, rel=0.01)
    assert unet["num_bytes"] == pytest.approx(2 * 4.8e6, rel=0.05)
    assert answer["model_bytes"] < answer["stages"]["denoiser"] < answer["peak_bytes"]
    assert answer["peak_bytes"] == answer["stages"][answer["peak_stage"]]
    assert (answer["fits"]["8"], answer["fits_card"], answer["card_bytes"]) == (True, False, 1_250_000_000)
    assert answer["changes"][-1]["fits_card"]
    assert answer["changes"][-1]["peak_bytes"] < answer["peak_bytes"]


def test_what_fits_is_ranked_with_the_line_to_measure_it(run: Run) -> None:
    lines = lines_of(run("plan", "tiny-sd", "--card", "1.25", "--gpu", "RTX 3060 12GB", "--why"))
    assert lines[0] == "tiny-sd on RTX 3060 (1.25 GB): fits with this recipe"
    start = next(
        number for number, line in enumerate(lines) if line.startswith("recipe  ") and "peak" in line
    )
    recipe = "compile+offload(model)"
    ranked = lines[start + 1 : start + 5]
    assert ranked[0].startswith(recipe)
    assert all("about " in line and line.endswith(" predicted") for line in ranked)
    times = [float(re.search(r"about ([\d.]+) m?s .*predicted", line)[1]) for line in ranked]
    assert times == sorted(times)
    measure = next(line for line in lines if line.startswith("measure "))
    assert shlex.split(measure)[3:7] == ["--model", "tiny-sd", "--recipe", recipe]


def test_what_is_faster_is_ranked_where_the_model_fits_too(run: Run) -> None:
    facts = json.loads(run("plan", "tiny-sd", "--card", "8", "--json").stdout)
    assert (facts["fits_card"], facts["times_of"], facts["brief"]["fits"]) == (
        True,
        "RTX 4060",
        "as published",
    )
    assert facts["changes"][-1]["fits_card"]
    assert facts["ranking"][0]["latency_s"] == facts["brief"]["latency"]["point"]


@pytest.mark.long
def test_a_recipe_that_does_not_fit_says_what_would(run: Run) -> None:
    lines = lines_of(run("plan", "tiny-sd", "--recipe", "compile", "--card", "1.25"))
    assert lines[0] == "tiny-sd on a card of 1.25 GB: does not fit"
    (line,) = (line for line in lines if line.startswith("next "))
    _, _, name, prompt, *words = shlex.split(line)
    app.get_command(None, name).make_context(name, [prompt, *words], parent=click.Context(app, obj={}))
    assert "compile" in words[words.index("--recipe") + 1]


def test_a_recipe_that_uses_free_memory_is_proposed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_STEP", 1e6)
    lines = lines_of(run("plan", "tiny-sd", "--recipe", "offload(group)", "--card", "8", "--why"))
    assert any(line.startswith("offload(group, keep=0.009)") and "faster" in line for line in lines)


def test_a_recipe_without_effect_is_planned_as_the_baseline(run: Run) -> None:
    output = run("plan", "tiny-sd", "--recipe", "fp16", "--why")
    assert "every targeted component is fp16 already; this is the baseline's memory" in output.stderr
    assert "tiny-sd, baseline, 128x128" in output.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("flux-dve",), 2, "no model 'flux-dve'; did you mean 'flux-dev'"),
        (("tiny-sd", "--recipe", "tiny_vea"), 2, "did you mean 'tiny_vae'"),
        (("tiny-sd", "--height", "100"), 2, "--height 100: tiny-sd takes multiples of"),
        (("tiny-sd", "--batch", "0"), 2, "--batch"),
        (("tiny-sd", "--card", "-1"), 2, "--card"),
        (
            ("tiny-sd", "--card", "RTX 4071"),
            2,
            "--card 'RTX 4071': no such GPU is known; did you mean 'RTX 4070'?",
        ),
        (("tiny-sd", "--recipe", "first_block_cache"), 3, "no chain of transformer blocks"),
    ],
)
def test_mistakes(run: Run, arguments: tuple[str, ...], code: int, says: str) -> None:
    assert says in run("plan", *arguments, code=code).stderr
