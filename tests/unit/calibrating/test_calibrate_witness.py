"""`vivace calibrate witness`, from the model's images to the limit that other commands use."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from vivace.benchmark import QualityRequest
from vivace.cli import app
from vivace.errors import UnknownModel, UsageError
from vivace.foundation.spec.limits import CLIP_LIMIT, DEFAULT_LIMITS, Limits
from vivace.measure import calibrating
from vivace.models.find import WEIGHTS, find_model
from vivace.models.scorers import find_scorer
from vivace.proofs.sides.plan import DrawRequest, prepare
from vivace.proofs.verdicts.as_good import Judges
from vivace.tuning.final.judge import judge_of

PROMPTS = [
    "a red circle above a blue square",
    "a large green triangle on a white background",
    "a small yellow star left of a purple diamond",
    "an orange cross in the top left on a black background",
    "a large purple square right of a small green star",
    "a cyan star above an orange triangle on a white gradient background",
]


class Machine:
    """A folder with a store, a cache, prompts, and a CLIP model that vivace does not know: the embedded one, copied."""

    def __init__(self, folder: Path) -> None:
        self.store, self.cache, self.clip = folder / "store", folder / "cache", folder / "clip"
        shutil.copytree(WEIGHTS / "tiny-clip", self.clip)
        self.prompts = folder / "prompts.txt"
        self.prompts.write_text("\n".join(PROMPTS))

    def calibrate(self, *more: str) -> Result:
        arguments = ["--model", "tiny-sd", "--steps", "6", "--store", str(self.store), "--grade", "5"]
        if "--prompts" not in more:
            arguments += ["--prompts", str(self.prompts)]
        arguments += ["--damage", "black patches", "--damage", "banding", *more]
        return CliRunner().invoke(app, ["calibrate", "witness", *arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine on which the embedded CLIP was calibrated for tiny-sd."""
    machine = Machine(tmp_path_factory.mktemp("machine"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VIVACE_CACHE", str(machine.cache))
        yield machine


@pytest.fixture(scope="module")
def calibrated(machine: Machine) -> dict[str, Any]:
    result = machine.calibrate("--witness", f"clip:{machine.clip}", "--json")
    assert result.exception is None, result.output
    (answer,) = json.loads(result.stdout)
    return dict(answer)


def test_nothing_was_calibrated_and_it_is_said(machine: Machine) -> None:
    scorer = find_scorer(str(machine.clip))
    judge = judge_of(find_model("tiny-sd"), QualityRequest(scorer=str(machine.clip)), DEFAULT_LIMITS)
    assert judge.limits.for_scorer(scorer.id).clip == CLIP_LIMIT
    assert judge.notes("vivace tune tiny-sd") == [
        f"no calibration of {scorer.name} for photographs: its limit (95 %) comes from drawn shapes; vivace calibrate "
        f"witness --model tiny-sd --witness clip:{scorer.name}"
    ]


def test_damage_that_the_witness_sees_sets_its_limit(calibrated: dict[str, Any]) -> None:
    black, banding = sorted(calibrated["damage"], key=lambda row: row["damage"] == "banding")
    assert calibrated["faint"] == ["banding"]
    assert 0.8 < calibrated["limit"] < 0.985
    assert calibrated["limit"] < min(calibrated["harmless"].values())
    assert black["kept"][-1] < calibrated["limit"] < black["kept"][0]
    assert banding["seen_from"] is None
    assert (calibrated["num_images"], calibrated["num_prompts"], calibrated["grade"]) == (6, 6, 5)
    assert calibrated["margin"] > 20
    assert calibrated["workload"]["num_inference_steps"] == 6
    assert calibrated["environment"]["device"] == "cpu"


def test_tune_and_prove_use_the_limit(machine: Machine, calibrated: dict[str, Any]) -> None:
    name, limit = str(machine.clip), calibrated["limit"]
    judge = judge_of(find_model("tiny-sd"), QualityRequest(scorer=name), DEFAULT_LIMITS)
    assert judge.limits.clip == limit
    (note,) = judge.notes("vivace tune tiny-sd")
    assert "was calibrated on 6 images of tiny-sd on 20" in note
    assert judge_of(find_model("tiny-sd"), QualityRequest(scorer=name), Limits(clip=0.9)).limits.clip == 0.9
    judges = Judges.of(prepare("tiny-sd:baseline", "tiny-sd:steps(4)", DrawRequest()), name)
    assert judges.notes == (note,)
    assert judges.model == calibrated["model"]


def test_the_same_command_draws_and_scores_nothing_again(
    machine: Machine, calibrated: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "_scorer", None)
    result = machine.calibrate("--witness", str(machine.clip))
    assert result.exception is None, result.output
    assert "6 images are drawn already" in result.stderr
    assert "drawn" not in result.stdout
    assert f"{100 * calibrated['limit']:.4g} % of the margin" in result.stdout
    assert "does not  see banding: other figures have to" in result.stdout
    assert "sees      black patches" in result.stdout
    assert "saved to" in result.stdout


def test_an_interrupted_run_goes_on(machine: Machine, calibrated: dict[str, Any]) -> None:
    """An image and the scores of another are missing, as after an interruption."""
    (of_model,) = (machine.store / "calibrate-witness").iterdir()
    drawn = sorted((of_model / "images").iterdir())
    kept = sorted(of_model.glob("*/00003.json"))
    pixels = Image.open(drawn[2]).tobytes()
    drawn[2].unlink()
    kept[0].unlink()
    others = {file: file.stat().st_mtime_ns for file in of_model.glob("*/*") if file.exists()}
    result = machine.calibrate("--witness", str(machine.clip), "--json")
    assert result.exception is None, result.output
    assert result.stderr.count("drawn\n") == 1
    assert kept[0].exists()
    assert all(file.stat().st_mtime_ns == at for file, at in others.items())
    assert Image.open(drawn[2]).tobytes() == pixels
    assert json.loads(result.stdout)[0]["damage"] == calibrated["damage"]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--damage", "blurr"], UsageError, "--damage blurr: no such kind.*blur"),
        (["--witness", "imagereward"], UsageError, "published as a pickle"),
        (["--witness", "clip:/no/such/folder"], UnknownModel, "/no/such/folder"),
        (["--model", "synthetic:sd15"], UsageError, "random weights"),
        (["--prompt", "a red circle", "--prompts", ""], UsageError, "1 prompt: a calibration needs 6"),
    ],
)
def test_what_cannot_be_calibrated_is_said(
    machine: Machine, arguments: list[str], error: type[Exception], message: str
) -> None:
    if "--prompt" in arguments:
        command = ["calibrate", "witness", "--store", str(machine.store), "--prompt", "a red circle"]
        result = CliRunner().invoke(app, command, standalone_mode=False)
    else:
        result = machine.calibrate(*arguments)
    assert isinstance(result.exception, error)
    with pytest.raises(error, match=message):
        raise result.exception
