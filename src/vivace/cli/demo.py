"""vivace demo"""

from __future__ import annotations

from pathlib import Path

import click

from vivace.cli import options
from vivace.foundation.untrusted.destinations import check_folder, check_writable, is_standard_output, replace


@click.command()
@options.store
@options.page("demo.html")
@click.option("--rerun", is_flag=True, help="Measure again what the store already has.")
def demo(store: Path, output: Path, rerun: bool) -> int:
    """Compare recipes on an embedded model, in about two minutes.

    tiny-sd generates thirteen prompts with 30 Euler-ancestral steps. Then one optimisation after the other is
    added: the one that helps this machine most, a tiny VAE, 20 steps, DPM++ 2M, guidance for the first 40 % only.
    Prints the table and writes a page with charts and images.
    """
    from vivace.answers.page import page_of
    from vivace.benchmark.demo import CANDIDATES, LONGEST, run_demo
    from vivace.benchmark.stored_answer import answer_of_stores
    from vivace.cli.bench import show_run
    from vivace.cli.progress_display import for_this_terminal

    check_writable(output)
    if not store.exists():
        check_folder(store)
    try:
        run, line = run_demo(store=store, rerun=rerun, progress=for_this_terminal())
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To continue, run the same command", err=True)
        return 130
    if len(run) < LONGEST:
        candidates = ", ".join(CANDIDATES)
        click.echo(
            f"none of {candidates} is clearly faster on this machine, so the demo skips that step\n", err=True
        )
    status = show_run(run, "table", line)
    replace(output, page_of(answer_of_stores([store], command="demo")).encode())
    click.echo(output, err=is_standard_output(output))
    click.echo("\nThese recipes were picked by hand. To have the fastest one found and proven:", err=True)
    click.echo("  vivace tune tiny-sd --minutes 4", err=True)
    return status
