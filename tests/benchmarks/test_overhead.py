"""The harness beside a plain script: both draw the same, each pair gives a ratio, cases are resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import overhead
from benchmarks.command import run
from benchmarks.overhead import line, ratios, read_cases
from benchmarks.overhead import overhead as command
from tests.narrow import SIDE, make_all_small

pytestmark = pytest.mark.long  # a script that measures, beside the package and not in it

QUICK = ["--device", "cpu", "--pairs", "3", "--warmup", "1", "--backend", "eager"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_all_small(monkeypatch)


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "overhead.jsonl"


@pytest.mark.soak
def test_every_case_is_a_line_of_pairs(
    record: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(command, ["--record", str(record), *QUICK]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [text.split(":")[0] for text in lines] == [
        f"{model} {mode}, 2 steps" for model in ("sd15", "sdxl", "flux-dev") for mode in ("eager", "compiled")
    ]
    assert all("over 3 pairs" in text for text in lines)
    cases = read_cases(record)
    assert len(cases) == 6
    for case in cases.values():
        assert len(case["plain_s"]) == len(case["vivace_s"]) == len(ratios(case)) == 3
        assert 0.2 < min(ratios(case)) <= max(ratios(case)) < 5, "the same work on either side"
        assert case["height"] == SIDE
        assert case["environment"]["device"] == "cpu"
        assert (case["backend"] == "eager") == (case["mode"] == "compiled")
    before = record.read_bytes()
    monkeypatch.setattr(overhead, "measure", lambda *_: pytest.fail("it is in the record"))
    assert run(command, ["--record", str(record), *QUICK]) == 0
    again = capfd.readouterr().out.splitlines()
    assert again == [f"{text} (in the record already)" for text in lines]
    assert record.read_bytes() == before


@pytest.mark.parametrize("name", ["sd15", "sdxl", "flux-dev"])
def test_both_sides_call_their_denoiser_the_same_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights get inputs of the same shape, as often; only the numbers in them differ."""
    calls_of: dict[str, list[Any]] = {}
    pipes: list[Any] = []

    def watching(function: Any) -> Any:
        def built(*args: Any, **kwargs: Any) -> Any:
            pipes.append(function(*args, **kwargs))
            return pipes[-1]

        return built

    monkeypatch.setattr(overhead, "build", watching(overhead.build))  # type: ignore[attr-defined]
    monkeypatch.setattr("vivace.models.synthetic.build", watching(overhead.build))  # type: ignore[attr-defined]
    for side in (overhead.plain, overhead.harness):
        pipes.clear()
        once = side(name, "cpu", None, "pt", 2)
        pipe = pipes[0]
        denoiser = pipe.transformer if hasattr(pipe, "transformer") else pipe.unet
        calls = calls_of.setdefault(side.__name__, [])

        def note(_: Any, args: Any, kwargs: Any, calls: list[Any] = calls) -> None:
            flat = torch.utils._pytree.tree_leaves((args, kwargs))
            calls.append([(tuple(t.shape), t.dtype) for t in flat if isinstance(t, torch.Tensor)])

        denoiser.register_forward_pre_hook(note, with_kwargs=True)
        assert once() > 0
        calls_of[f"{side.__name__} weights"] = [p.clone() for p in list(denoiser.parameters())[:3]]
    assert calls_of["plain"] == calls_of["harness"]
    assert len(calls_of["plain"]) >= 2
    for mine, theirs in zip(calls_of["plain weights"], calls_of["harness weights"], strict=True):
        assert torch.equal(mine, theirs)


def test_a_case_that_fails_is_told_and_the_next_goes_on(
    record: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = overhead.measure

    def failing(name: str, mode: str, *rest: Any) -> dict[str, Any]:
        if mode == "compiled":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried ...\nmore")
        return measure(name, mode, *rest)

    monkeypatch.setattr(overhead, "measure", failing)
    arguments = ["--record", str(record), *QUICK, "--only", "sd15", "--mode", "compiled", "--mode", "eager"]
    assert run(command, arguments) == 4
    out = capfd.readouterr().out.splitlines()
    assert out[0] == "sd15 compiled: failed: CUDA out of memory. Tried ..."
    assert out[1].startswith("sd15 eager, 2 steps: plain ")
    assert list(read_cases(record)) == [("sd15", "eager", "pil", 2)]


def test_it_stops_between_cases_when_the_time_is_over(
    record: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(command, ["--record", str(record), *QUICK, "--limit-s", "0"]) == 0
    assert "0 s are over; the same command goes on with sd15 eager, sd15 compiled, sdxl" in (
        capfd.readouterr().err
    )
    assert not record.exists()


def test_the_ratio_is_the_pairs_own() -> None:
    case = {
        "model": "synthetic:sdxl",
        "mode": "eager",
        "num_inference_steps": 50,
        "plain_s": [1.0, 2.0, 4.0],
        "vivace_s": [1.1, 2.0, 3.6],
    }
    assert ratios(case) == pytest.approx([1.1, 1.0, 0.9])
    assert line(case).startswith("sdxl eager, 50 steps: plain 2.00 s, vivace 2.00 s, ratio 1.0000 [0.84")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--only", "flux-dve"], 2, "did you mean 'flux-dev'"),
        (["--mode", "fast"], 2, "'eager', 'compiled'"),
        (["--pairs", "0"], 2, "--pairs"),
        (["--record", "broken.jsonl"], 3, "broken.jsonl is not a record of this script"),
        (["--record", "elsewhere.jsonl"], 3, "was made on another GPU, and this is"),
        (["--device", "cuda"], 3, "--device cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_of_overhead_are_one_message(
    arguments: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tests.make import make_environment

    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n')
    there = make_environment().model_copy(update={"device_name": "another GPU"})
    case = {"model": "synthetic:sdxl", "mode": "eager", "output": "pil", "plain_s": [1.0], "vivace_s": [1.0]}
    case["num_inference_steps"] = 50
    case["environment"] = there.model_dump(mode="json")
    (tmp_path / "elsewhere.jsonl").write_text(json.dumps(case) + "\n")
    record_option = [] if "--record" in arguments else ["--record", "new.jsonl"]
    assert run(command, [*record_option, *arguments]) == code
    done = capfd.readouterr()
    assert says in done.err
    assert done.out == ""
    assert not (tmp_path / "new.jsonl").exists()
