"""What the answer says, what it asks for next, and the command."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vivace
from tests.make import make_environment, make_round, make_trial
from tests.typed import typed
from tests.unit.recommendation.tables import ask, evidence, table
from vivace.benchmark.store import Store
from vivace.cli import app
from vivace.errors import StoreError, UnknownModel, UsageError
from vivace.evidence.recommendation import Recommendation
from vivace.evidence.recommendation.best import best_recipe
from vivace.evidence.recommendation.predicted import chip_limit
from vivace.foundation.spec.record import Outcome
from vivace.recipes.resolve import resolve


def test_the_next_command_measures_what_is_not_known_here() -> None:
    answer = ask(table(evidence("fp8_static+compile", 1.9), evidence("compile", 1.3), kind="committed"))
    assert answer.next == (
        "vivace bench --model flux-dev --recipe baseline --recipe 'quantize(fp8_static)+compile' --recipe compile "
        "--prompt-set real",
    )
    mine = table(evidence("compile", 1.3))
    better = ask(mine, table(evidence("fp8_static+compile", 1.9), kind="committed"))
    assert better.recipe == "compile"
    assert "--recipe 'quantize(fp8_static)+compile'" in better.next[0]
    for line in (*answer.next, *better.next):
        words = shlex.split(line)
        options = {option for param in app.get_command(None, words[1]).params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options
        for word, value in itertools.pairwise(words):
            if word == "--recipe":
                resolve(value)


def make_store(folder: Path, python_ms: dict[str, float] | None = None) -> Path:
    """Make a store with a comparison on tiny-sd: compile twice as fast, tiny_vae four times without judged images.

    Args:
        python_ms: of recipes, how long a loop of Python took beside them.
    """
    with Store.create(folder) as opened:
        trials, environment = (
            [make_trial(r) for r in ("baseline", "compile", "tiny_vae", "bf16")],
            make_environment(),
        )
        opened.start_run("vivace bench", trials, environment)
        for trial, factor in zip(trials, (1.0, 0.5, 0.25, None), strict=True):
            for index in range(2):
                times = tuple(factor * s for s in (1.0, 1.01, 0.99, 1.0)) if factor else ()
                outcome = Outcome.MEASURED if factor else Outcome.CRASHED
                round_ = make_round(index, times, outcome)
                if python_ms:
                    conditions = {"python_ms": python_ms[trial.recipe.text]}
                    round_ = round_.model_copy(update={"conditions": conditions})
                opened.append(trial.key(environment), round_)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / ".vivace")


def test_disturbed_records_claim_nothing_and_do_not_look_like_no_gain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    busy = {"baseline": 3.0, "compile": 9.0, "tiny_vae": 9.0, "dtype(bf16)": 3.0}
    make_store(Path(".vivace"), busy)
    answer = vivace.recommend("tiny-sd", gpu="cpu")
    assert answer.disturbed == ("baseline", "tiny_vae", "compile")
    assert answer.basis is None or answer.basis.kind != "own"
    assert answer.next[0].endswith("--rerun")
    assert "disturbed your own times of tiny_vae, compile" in " ".join(str(answer).split())
    assert "--rerun" in str(answer), "without --why"
    for word in ("best", "best(changes=True)"):
        why = best_recipe(word, "tiny-sd", device="cpu").why
        assert "they claim no gain" in why
        assert answer.next[0] in why
    make_store(Path("quiet"))
    assert not vivace.recommend("tiny-sd", gpu="cpu", store=[".vivace", "quiet"]).disturbed


def test_a_store_comes_before_what_ships(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    answer = vivace.recommend("tiny-sd")
    assert answer.basis is not None
    assert (answer.recipe, answer.basis.kind, answer.basis.gpu) == ("compile", "own", "Test CPU")
    assert {row.recipe: row.kind for row in answer.left_out} == {
        "tiny_vae": "unproven",
        "dtype(bf16)": "not measured",
    }
    assert answer.elsewhere[0].basis.kind == "committed"
    assert "you have no records of it" not in answer.missing
    assert vivace.recommend("tiny-sd", store=[]).basis != answer.basis
    # A process's resident set counts on a CPU, and says nothing about a GPU.
    assert vivace.recommend("tiny-sd", max_memory="1GB").recipe == "compile"
    assert vivace.recommend("tiny-sd", max_memory="1GB", gpu="H100").recipe is None


def test_wrong_arguments_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --price-per-hour"):
        vivace.recommend("flux-dev", goal="cost")
    with pytest.raises(UsageError, match="goal='speed' must be one of 'latency', 'memory'"):
        vivace.recommend("flux-dev", goal="speed")
    with pytest.raises(UnknownModel, match="did you mean 'flux-dev'"):
        vivace.recommend("flux-dv")
    with pytest.raises(StoreError, match="no store at"):
        vivace.recommend("flux-dev", store=tmp_path / "none")
    with pytest.raises(UsageError, match=r"-1.*is not an amount of memory"):
        vivace.recommend("flux-dev", max_memory=-1.0)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_recommend(*arguments: str, code: int = 0) -> str:
        assert typed(monkeypatch, "recommend", *arguments) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    asked = ("flux-dev", "--gpu", "H200", "--max-memory", "20GB", "--same-picture")
    short = run_recommend(*asked)
    assert len(short.splitlines()) <= 8
    assert "--why" in short
    lines = run_recommend(*asked, "--why").splitlines()
    assert not any("--why" in line for line in lines), "it was said already"
    long = [line for line in lines if len(line) > 80 and not line.startswith("draw")]
    assert all(len(max(re.findall(r"'[^']*'|\S+", line), key=len)) > 40 for line in long), (
        "only recipes that cannot be broken"
    )
    assert {"goal", "stands", "memory", "quality", "runner-up", "missing", "confidence", "measure"} <= {
        line.split()[0] for line in lines if line and not line.startswith(" ")
    }
    plain = json.loads(run_recommend("flux-dev", "--gpu", "H200", "--format", "json"))
    brief = plain.pop("brief")
    answer = Recommendation.model_validate(plain)
    assert answer.basis is not None
    assert (answer.basis.kind, answer.basis.near) == ("committed", "same")
    assert brief["recipe"] == answer.recipe
    assert "--price-per-hour" in run_recommend("sdxl", "--goal", "cost", code=2)
    assert "12GiB" in run_recommend("sdxl", "--max-memory", "much", code=2)


def test_the_answer_needs_no_torch() -> None:
    code = (
        "import sys, vivace; print(vivace.recommend('flux-dev', gpu='A100').recipe, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False", done.stdout


def test_the_limit_of_the_chip_is_told() -> None:
    answer = vivace.recommend("flux2-dev", gpu="H100", store=())
    assert answer.limit is not None
    assert answer.limit.half_s == pytest.approx(50 * 282.6 / 989.5, rel=1e-3)
    assert answer.limit.eight_s == pytest.approx(answer.limit.half_s / 2, rel=1e-6)
    assert "50 computed steps of 283 TFLOP take at" in answer.explain()
    limit = chip_limit("flux2-dev", "B200")
    assert limit is not None
    seconds = [limit.least_s(f"bf16+{text}") for text in ("compile", "fp8", "mxfp8", "nvfp4")]
    assert seconds == [limit.half_s, limit.half_s / 2, limit.half_s / 2, limit.half_s / 4]
    assert chip_limit("flux2-dev", "banana") is None, "no data sheet"
    assert vivace.recommend("tiny-sd", gpu="H100", store=()).limit is None, "no count"
