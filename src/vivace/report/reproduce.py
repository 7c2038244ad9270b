"""The command that measures a comparison again, with its whole workload, and the prompts as a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.terminal_text import lines_of
from vivace.report.downloads import OfferedFile, text_file
from vivace.report.rows import Row

PROMPTS_FILE = "prompts"
_MAX_SHOWN = 20_000  # characters of prompts in the page
_MAX_FILE_BYTES = 300_000


@dataclass(frozen=True)
class Reproduction:
    """A comparison's command line, and its prompts.

    Attributes:
        command: of this comparison alone, with each option of the workload; "" if no command line can express it.
        prompts: those that are shown; `num_hidden` more are not.
        file: the prompts, one per line, as --prompts reads them; None if they cannot be written so.
    """

    command: str
    prompts: tuple[str, ...]
    num_hidden: int
    file: OfferedFile | None


def reproduction(rows: Sequence[Row]) -> Reproduction:
    """Return the command and prompts that measure these rows again, the baseline first."""
    workload = rows[0].record.trial.workload
    file = None
    if all(_is_line(prompt) for prompt in workload.prompts):
        file = text_file("".join(f"{p}\n" for p in workload.prompts), "txt", PROMPTS_FILE, _MAX_FILE_BYTES)
    num_listed, left = 0, _MAX_SHOWN
    for prompt in workload.prompts:
        left -= len(prompt)
        if left < 0:
            break
        num_listed += 1
    return Reproduction(
        command="" if file is None else _command(rows, f"{PROMPTS_FILE}.txt"),
        prompts=workload.prompts[:num_listed],
        num_hidden=len(workload.prompts) - num_listed,
        file=file if file is not None and file.uri is not None else None,
    )


def _is_line(prompt: str) -> bool:
    """Whether a file of prompts can hold the prompt: as one line that keeps its spaces."""
    return bool(prompt) and prompt == prompt.strip() and len(lines_of(prompt)) == 1


def _command(rows: Sequence[Row], prompts_file: str) -> str:
    """Return the command, an option a line; "" if its seeds do not follow one another."""
    trial, environment = rows[0].record.trial, rows[0].record.environment
    options = _workload_options(trial.workload, prompts_file)
    if options is None:
        return ""
    lines = [
        ["vivace", "bench", "--model", trial.model.name],
        *(["--recipe", row.record.trial.recipe.text] for row in rows),
        *options,
        ["--rounds", str(max(len(row.record.rounds) for row in rows)), "--no-rivals"],
        ["--device", trial.device, "--threads", str(environment.num_threads)],
    ]
    return " \\\n  ".join(shlex.join(line) for line in lines)


def _workload_options(workload: Workload, prompts_file: str) -> list[list[str]] | None:
    first, count = workload.seeds[0], len(workload.seeds)
    if workload.seeds != tuple(range(first, first + count)):
        return None
    options = [
        ["--prompts", prompts_file, "--seed", str(first), "--seeds", str(count)],
        ["--height", str(workload.height), "--width", str(workload.width)],
        [
            "--num-inference-steps",
            str(workload.num_inference_steps),
            "--guidance-scale",
            repr(workload.guidance_scale).removesuffix(".0"),
        ],
    ]
    extra = ["--batch", str(workload.batch)] if workload.batch > 1 else []
    extra += ["--text", workload.text] if workload.text != "prompts" else []
    extra += ["--task", workload.task] if workload.task != "text" else []
    extra += [] if workload.strength is None else ["--strength", f"{workload.strength:g}"]
    return [*options, extra] if extra else options
