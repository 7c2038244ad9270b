"""Commands, options and recipes in the documentation exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from vivace.cli import app
from vivace.cli.measuring.bench_endpoint import FLAG, ByEndpoint, bench_endpoint
from vivace.errors import RecipeError
from vivace.evidence.recommendation.best import is_best
from vivace.recipes.resolve import resolve

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")]
PLACEHOLDERS = re.compile(r"^(R\d?|RECIPE|[<.…].*|.*\.\.\.)$")


def commands_in(text: str) -> Iterator[str]:
    """Yield command lines in code blocks and code spans."""
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"\s*(?:\$ )?(?:\S*/)?(vivace [a-z].*)", line):
                yield match.group(1)
    spans = re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    yield from (" ".join(span.split()) for span in spans if re.match(r"vivace\s[a-z]", span))


def problem_with(line: str) -> str | None:
    """Return what a command line names that does not exist, or None."""
    try:
        words = shlex.split(line, comments=True)[1:]
    except ValueError:
        return None  # prose with an apostrophe
    command: click.Command = app
    while words and isinstance(command, click.Group):
        if words[0].startswith("-"):
            break
        subcommand = command.get_command(click.Context(command), words[0])
        if subcommand is None:
            return f"no command {words[0]}"
        command, words = subcommand, words[1:]
    if isinstance(command, ByEndpoint) and FLAG in words:
        command = bench_endpoint
    options = {name: param for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        value = value or " ".join(words[index + 1 : index + 2])
        if name.startswith("--") and name not in {*options, "--help", "--version"}:
            return f"no option {name}"
        if name in {"--recipe", "-r"} and not PLACEHOLDERS.match(value):
            if is_best(value):
                continue
            try:
                resolve(value)
            except RecipeError as error:
                return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_the_docs_name_exists(page: Path) -> None:
    text = page.read_text()
    made_here = re.findall(r'name\b.* = "(\w+)"', text)  # the technique of a worked example
    lines = (line for line in commands_in(text) if not any(name in line for name in made_here))
    problems = {line: problem for line in lines if (problem := problem_with(line))}
    assert not problems


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vivace race --model sd15", "no command race"),
        ("vivace bench --stpes 4", "no option --stpes"),
        ("vivace bench --recipe fp9", "no technique 'fp9'"),
        ("vivace bench --model M --recipe R --recipe 'bf16+compile'", None),
    ],
)
def test_what_does_not_exist_is_found(line: str, expected: str | None) -> None:
    problem = problem_with(line)
    assert problem == expected if expected is None else expected in (problem or "")


def test_commands_are_found_in_blocks_and_spans() -> None:
    text = "Run `vivace\nbench --model M`.\n\n```sh\n.venv/bin/vivace demo  # a minute\n```\n"
    assert sorted(commands_in(text)) == ["vivace bench --model M", "vivace demo  # a minute"]
    assert len([line for page in PAGES for line in commands_in(page.read_text())]) > 40
