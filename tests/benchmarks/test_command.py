"""What the measuring scripts' commands share: their options, and when the time is over."""

import click

from benchmarks import every_technique, several_gpus, skipped_work

SHARED = ("record", "store", "limit_s", "repeats", "warmup", "timeout", "device")


def test_three_scripts_say_it_alike() -> None:
    def help_of(command: click.Command) -> dict[str, tuple[str, str | None]]:
        options = {p.name: p for p in command.params if isinstance(p, click.Option)}
        return {name: (options[name].opts[0], options[name].help) for name in SHARED[1:]}

    scripts = (every_technique.every_technique, skipped_work.skipped_work, several_gpus.several_gpus)
    assert help_of(scripts[0]) == help_of(scripts[1]) == help_of(scripts[2])
