"""The page docs/cli.md: the help of every command."""

from __future__ import annotations

import click

from vivace.cli import app
from vivace.cli.measuring.bench_endpoint import FLAG, ByEndpoint, bench_endpoint


def page(note: str) -> str:
    lines = [note, "# Command line\n", "The help of every command, with all options and their defaults.\n"]
    settings: dict[str, object] = {**app.context_settings, "terminal_width": 100}
    root = click.Context(app, info_name="vivace", **settings)  # type: ignore[arg-type]
    lines += ["```text", app.get_help(root), "```\n"]
    lines += _commands(root, app, "vivace")
    return "\n".join(lines).rstrip() + "\n"


def _commands(parent: click.Context, group: click.Group, path: str) -> list[str]:
    lines = []
    for name in group.list_commands(parent):
        command = group.get_command(parent, name)
        assert command is not None
        context = click.Context(
            command, info_name=name, parent=parent, max_content_width=100, terminal_width=100
        )
        lines += [f"## {path} {name}\n", "```text", command.get_help(context), "```\n"]
        if isinstance(command, ByEndpoint):
            context = click.Context(
                bench_endpoint, info_name=name, parent=parent, max_content_width=100, terminal_width=100
            )
            lines += [f"## {path} {name} {FLAG}\n", "```text", bench_endpoint.get_help(context), "```\n"]
        if isinstance(command, click.Group):
            lines += _commands(context, command, f"{path} {name}")
    return lines
