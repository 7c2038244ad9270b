"""Every function of the Python API refuses arguments of a wrong type in words, before it does anything."""

import inspect
from pathlib import Path
from typing import Any

import pytest

import vivace
from vivace.errors import UsageError, VivaceError
from vivace.foundation.spec.arguments import check_arguments

REQUIRED: dict[str, tuple[Any, ...]] = {
    "apply": (object(),),
    "bench": ("tiny-sd", ["baseline"]),
    "compare": ("tiny-sd", "baseline", "steps(3)"),
    "load": ("tiny-sd",),
    "profile": ("tiny-sd",),
    "prove": ("tiny-sd:baseline", "tiny-sd:steps(3)"),
    "recommend": ("tiny-sd",),
    "study": ("000",),
    "tune": ("tiny-sd",),
}
CHECKED = (
    "str",
    "int",
    "float",
    "bool",
    "Sequence",
    "Mapping",
    "Device",
    "Task",
    "Goal",
    "Claim",
    "Limits",
    "Path",
)
WRONG: tuple[Any, ...] = (object(), 3 + 4j, {1, 2})


def test_the_functions_are_all_of_the_package() -> None:
    public = {name for name in vivace.__all__ if inspect.isfunction(getattr(vivace, name))}
    assert set(REQUIRED) == public


@pytest.mark.parametrize("name", sorted(REQUIRED))
def test_each_argument_of_another_type_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, given = getattr(vivace, name), list(REQUIRED[name])
    for index, parameter in enumerate(inspect.signature(function).parameters.values()):
        words = str(parameter.annotation).replace("[", " ").replace("|", " ").split()
        if (
            parameter.kind is parameter.VAR_KEYWORD
            or not set(words) & set(CHECKED)
            or parameter.name == "pipe"
        ):
            continue
        for wrong in WRONG:
            args, more = list(given), {}
            if index < len(args):
                args[index] = wrong
            else:
                more[parameter.name] = wrong
            with pytest.raises(UsageError, match=rf"vivace\.{name}: {parameter.name}=.* must be "):
                function(*args, **more)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: vivace.bench("tiny-sd", "baseline"), "recipes='baseline' must be a list of text"),
        (lambda: vivace.load("tiny-sd", ["bf16"]), "recipe=.* must be text"),
        (lambda: vivace.load("tiny-sd", device="gpu"), "'gpu' is none of auto, cpu, cuda"),
        (lambda: vivace.bench("tiny-sd", ["baseline"], device="gpu"), "'gpu' must be one of 'auto', 'cpu', 'cuda'"),
        (lambda: vivace.load(None), "model=None must be text"),
        (lambda: vivace.tune("tiny-sd", goal="fast"), "goal='fast' must be one of 'latency'"),
        (lambda: vivace.tune("tiny-sd", minutes="8min"), "minutes='8min' must be a number"),
        (lambda: vivace.tune("tiny-sd", max_memory_bytes=12), r"12.* is 12 bytes, which is not .*12GB"),
        (lambda: vivace.tune("tiny-sd", max_first_call_s="soon"), "'soon' is not a time"),
        (lambda: vivace.recommend("tiny-sd", max_memory=12e9), "GB"),
        (lambda: vivace.recommend("tiny-sd", max_memory=-1), "'-1' is not an amount of memory"),
        (lambda: vivace.recommend("tiny-sd", min_quality=0.5), "min_quality=0.5 must be a Limits"),
        (lambda: vivace.prove("a:b", "c:d", timeout_s=True), "timeout_s=True must be a number"),
        (lambda: vivace.bench("tiny-sd", ["baseline"], height="tall"), "--height 'tall' must be a whole number"),
        (lambda: vivace.bench("tiny-sd", ["baseline"], timing=3), "--timing 3"),
        (lambda: vivace.compare("tiny-sd", "baseline", "steps(3)", timing=3), "--timing"),
        (lambda: vivace.profile("tiny-sd", timing=None), "--timing"),
        (lambda: vivace.profile("tiny-sd", device="gpu"), "'gpu'"),
        (lambda: vivace.bench("tiny-sd", ["baseline"], quality="no"), "--quality"),
        (lambda: vivace.study(4), "name=4 must be text or a path"),
    ],
)  # fmt: skip
def test_what_people_give(call: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VivaceError, match=words):
        call()


def test_a_number_is_gigabytes_as_on_the_command_line() -> None:
    for amount in (24, 24.0, "24", "24GB", "24e0GB"[:2] + " gb"):
        assert (
            vivace.recommend("flux-dev", gpu="A100", max_memory=amount, store=()).criteria.max_bytes == 24e9
        )


def test_a_path_is_taken_in_the_place_of_a_text() -> None:
    @check_arguments
    def named(model: "str", more: "str" = "") -> tuple[str, str]:
        return model, more

    assert named(Path("a") / "b", more=Path("c")) == (str(Path("a") / "b"), "c")
