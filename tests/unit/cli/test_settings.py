"""One rule for each thing that commands share: the same words and exit code wherever it is given."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

import vivace
from vivace.cli.commands import COMMANDS, app
from vivace.cli.measuring.bench_endpoint import bench_endpoint
from vivace.errors import UsageError


def commands() -> Iterator[click.Command]:
    for name in COMMANDS:
        command = app.get_command(None, name)
        yield from command.commands.values() if isinstance(command, click.Group) else [command]
    yield bench_endpoint


def arguments(command: click.Command) -> list[str]:
    """Return what a command cannot do without."""
    words = []
    for parameter in command.params:
        if parameter.required:
            words += ["x"] if isinstance(parameter, click.Argument) else [parameter.opts[0], "http://x/v1"]
    return words


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--device", "foo", "'foo' is not one of 'auto', 'cpu', 'cuda', 'xpu', 'mps'"),
        ("--task", "foo", "'foo' is not one of 'text', 'image', 'inpaint', "),
        ("--seed", "-1", f"-1 is not in the range 0<=x<={2**63 - 1}"),
        ("--seed", str(2**64), f"{2**64} is not in the range 0<=x<={2**63 - 1}"),
        ("--steps", "0", "0 is not in the range 1<=x<=1000"),
        ("--guidance-scale", "nan", "'nan' is not a finite number"),
        ("--height", "0", "0 is not in the range 1<=x<=16384"),
        ("--width", "99999", "99999 is not in the range 1<=x<=16384"),
        ("--sizes", "17x16", "multiples of 8; got 17x16"),
        ("--size", "17x16", "multiples of 8; got 17x16"),
        ("--seeds", "0", "0 is not in the range 1<=x<=10000"),
        ("--threads", "0", "0 is not in the range 1<=x<=1024"),
        ("--min-quality", "clip=nan", "clip=nan must be a finite number"),
    ],
)
def test_a_wrong_value_is_refused_by_every_command_in_the_same_words(
    flag: str, value: str, words: str
) -> None:
    having = [command for command in commands() if any(flag in option.opts for option in command.params)]
    assert having
    for command in having:
        done = CliRunner().invoke(command, [*arguments(command), flag, value], obj={})
        assert done.exit_code == 2, command.name
        assert words in done.stderr.replace("\n", " "), command.name


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"device": "foo"}, {"threads": 0}])
def test_python_has_the_same_rules(wrong: dict, tmp_path) -> None:
    name = next(iter(wrong))
    with pytest.raises(UsageError, match=rf"vivace\.tune: {name}="):
        vivace.tune("tiny-sd", store=tmp_path / "s", **wrong)
    assert not (tmp_path / "s").exists()
