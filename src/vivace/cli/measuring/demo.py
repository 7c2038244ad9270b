"""vivace demo"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from vivace.cli.command import Rerun, command, interrupted
from vivace.foundation.spec.settings import DEFAULT_STORE, FILE, Option, Settings, Store
from vivace.foundation.untrusted.destinations import check_folder, check_writable, is_standard_output, replace


class DemoCommand(Settings):
    store: Store = Path(DEFAULT_STORE)
    output: Annotated[Path, Option("Page to write.", "-o --output", path=FILE)] = Path("demo.html")
    rerun: Rerun = False


@command(DemoCommand)
def demo(settings: DemoCommand) -> int:
    """Compare recipes on an embedded model, in about two minutes.

    tiny-sd generates thirteen prompts with 30 Euler-ancestral steps. Then one optimisation after the other is
    added: the one that helps this machine most, a tiny VAE, 20 steps, DPM++ 2M, guidance for the first 40 % only.
    Prints the table and writes a page with charts and images.
    """
    from vivace.answers.page import page_of
    from vivace.benchmark.demo import CANDIDATES, LONGEST, run_demo
    from vivace.benchmark.run import answer_of_stores
    from vivace.cli.display.progress_display import for_this_terminal
    from vivace.cli.measuring.bench import show_run

    check_writable(settings.output)
    if not settings.store.exists():
        check_folder(settings.store)
    try:
        run, line = run_demo(store=settings.store, rerun=settings.rerun, progress=for_this_terminal())
    except KeyboardInterrupt:
        return interrupted("finished rounds are kept")
    if len(run) < LONGEST:
        candidates = ", ".join(CANDIDATES)
        click.echo(
            f"none of {candidates} is clearly faster on this machine, so the demo skips that step\n", err=True
        )
    status = show_run(run, "table", line)
    replace(settings.output, page_of(answer_of_stores([settings.store], command="demo")).encode())
    click.echo(settings.output, err=is_standard_output(settings.output))
    click.echo("\nThese recipes were picked by hand. To have the fastest one found and proven:", err=True)
    click.echo("  vivace tune tiny-sd --minutes 4", err=True)
    return status
