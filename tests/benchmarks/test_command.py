"""What the measuring scripts' commands share: their options, and when the time is over."""

from pathlib import Path

import click
import pytest

from benchmarks import every_technique, several_gpus, skipped_work
from benchmarks.command import MEASURED_IN_PART, Measuring, measures, run
from vivace.benchmark import Timing

SHARED = ("record", "store", "limit_s", "repeats", "warmup", "timeout", "device")


def options_of(*arguments: str) -> tuple[Measuring, str]:
    calls: list[tuple[Measuring, str]] = []

    @click.command("measured")
    @click.argument("name")
    @measures(record="results/NAME.json", repeats=3, warmup=2, timeout_s=90)
    @click.option("--only", default="all")
    def measured(name: str, how: Measuring, only: str) -> int:
        calls.append((how, f"{name} {only}"))
        return how.ended("the next") if how.is_over else 0

    status = run(measured, ["sd15", *arguments])
    assert status == (MEASURED_IN_PART if "--limit-s" in arguments else 0)
    return calls[0]


def test_what_is_not_said_is_the_scripts_own() -> None:
    how, others = options_of()
    assert (how.record, how.store, how.limit_s, how.device) == (None, Path(".vivace"), None, "auto")
    assert how.timing == Timing(rounds=1, repeats=3, max_warmup=2, timeout_s=90)
    assert not how.is_over
    assert others == "sd15 all", "the command's own arguments are as they were"


def test_what_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    how, others = options_of(
        "--record", "a.json", "--store", "s", "--limit-s", "0", "--repeats", "7", "--warmup", "5", "--timeout", "30",
        "--device", "cpu", "--only", "x",
    )  # fmt: skip
    assert (how.record, how.store, how.limit_s, how.device) == (Path("a.json"), Path("s"), 0, "cpu")
    assert how.timing == Timing(rounds=1, repeats=7, max_warmup=5, timeout_s=30)
    assert others == "sd15 x"
    assert capfd.readouterr().err == "0 s are over; the same command goes on with the next\n"


def test_three_scripts_say_it_alike() -> None:
    def help_of(command: click.Command) -> dict[str, tuple[str, str | None]]:
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        return {name: (options[name].opts[0], options[name].help) for name in SHARED[1:]}

    scripts = (every_technique.every_technique, skipped_work.skipped_work, several_gpus.several_gpus)
    assert help_of(scripts[0]) == help_of(scripts[1]) == help_of(scripts[2])
