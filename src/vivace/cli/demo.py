"""vivace demo"""

from __future__ import annotations

from pathlib import Path

import click

from vivace.cli import options


@click.command()
@options.store
@options.page("demo.html")
@click.option("--rerun", is_flag=True, help="Measure again what is in the store already.")
def demo(store: Path, output: Path, rerun: bool) -> int:
    """Show what vivace does, on this machine, in about a minute.

    The embedded model tiny-sd draws three prompts at two seeds with 30 Euler-ancestral steps; then one optimisation
    after the other is added: what helps this machine, a tiny VAE, 20 steps, DPM++ 2M, guidance for the first 40 % only.
    Prints the table and writes a page with the pictures.
    """
    from vivace.benchmark.demo import CANDIDATES, LONGEST, run_demo
    from vivace.cli.bench import show
    from vivace.cli.progress import for_this_terminal
    from vivace.cli.report import write_page

    try:
        run, line = run_demo(store=store, rerun=rerun, progress=for_this_terminal())
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept, the same command continues from here", err=True)
        return 130
    if len(run) < LONGEST:
        tried = ", ".join(CANDIDATES)
        click.echo(
            f"nothing of {tried} is clearly faster on this machine, so that step is left out\n", err=True
        )
    status = show(run, "table", line)
    click.echo(write_page(store, output))
    return status
