"""The page docs/lint.md: the rules of `vivace lint`, and the headings that it knows, from the code."""

from __future__ import annotations

import inspect

from vivace.answers.markdown import markdown_lines
from vivace.architectures import FAMILIES
from vivace.evidence.lint.check import RULES
from vivace.evidence.lint.columns import SYNONYMS

_TEXT = """{note}
# Checking tables

`vivace lint FILE...` reads tables of latencies in CSV, TSV, Markdown (also in a .txt), HTML and JSON, by anybody, and
finds rows that cannot be:

```sh
vivace lint README.md results.csv
vivace lint timings.csv --model flux-dev --gpu H100 --steps 28 --format json
```

- **Impossible**: figures that contradict each other or the chip. The exit code is then 1.
- **Doubtful**: figures that can be true, but do not show what they seem to. They do not change the exit code.

Each finding names the file, the line, the rule and the figures, says why, and what to check. Figures may be rounded:
each may be off by half of its last digit, and only what remains wrong is reported. A table that can be right is not
called impossible.

For each table it says which columns were read, and as what; on standard error, which columns, rows and cells were not,
and why. A file of which nothing was read gives a warning.

## Rules

{rules}

A speed-up is a ratio (`2.1x`) or a percentage (`+25%`, `25% faster`, `20% less`), which may be of the speed or of the
time; it is wrong only if no meaning fits, to no baseline of the table, for no time, step or throughput of the row.
A speed-up that comes with its own interval was measured in pairs, perhaps with another run of the baseline than the one
in the table. Where it disagrees with the table's times it is doubtful, not impossible.

## Headings

Case, underscores, units (`(s)`, `[ms]`, `, GiB`, `in seconds`, the endings `_s` and `_bytes`), and the path of a key in
JSON do not matter, and a statistic may stand beside words for a call's time (`p50_latency_ms`). Times below different
keys of JSON are of different things. A heading may also name a GPU: `A100 (s)`, `Model Memory RTX 4090 (GB)`; each GPU
is then a row of its own. A row with only its first cell is a title, as of a model, for the rows below it.

## Cells

Cells may have units: of time (`ms`, `sec`, `1m32s`, `1:32`), of size (`GB` and `GiB`), of rate (`it/s`, `s/it`,
`img/s`, `img/min`, `s/image`); a spread (`1.2 ± 0.1 s`) or an interval (`[0.97, 1.16]`). Whether a comma stands before
decimals (`0,512`) or between thousands (`3,705`) is told from the whole column, the other columns, and the separator of
the CSV (a comma, a semicolon, a tab or a bar). Where nothing tells, that is said, and only what is wrong in both cases
is reported.

## Meanings

{headings}

## Limits of chips

`chip-limit` needs the model, the GPU and the number of steps, from columns, from the headings above the table or
from `--model`, `--gpu` and `--steps`. It is silent about recipes that skip work, and about other sizes than the model's
own.

The rates are those of the [data sheets](hardware.md#gpus-by-name), dense; the SXM module's where there are several.

{models}

Counted by vivace on shapes ([record](../results/model-flops.json)); `vivace plan` does it for any recipe and size.

## What it finds in published tables

In five published studies of diffusion pipelines it finds, among others: a profile in which a label takes 105.62 % (and,
with tuning inside the window, 270.83 %) of the GPU's time, and self percentages that add up to 262 %; a mean of 2.05 s
below its minimum of 2.09 s; a p99 of an unknown number of samples; times per step that are the total divided by the
steps in all 37 rows; peaks of 10 MB above the model's weights; and an int8 row whose CLIP score says that its images
are ruined.
"""


def page(note: str) -> str:
    """Return the page as Markdown."""
    rules = [(f"`{name}`", (inspect.getdoc(rule) or "").rstrip(".")) for name, rule in RULES.items()]
    headings = [
        (role.replace("_", " "), ", ".join(f"`{name}`" for name in names)) for role, names in SYNONYMS.items()
    ]
    models = [
        (model.title, f"{model.step_flop / 1e12:.3g}")
        for family in FAMILIES
        for model in family.models
        if model.labels
    ]
    return _TEXT.format(
        note=note,
        rules="\n".join(markdown_lines(("rule", "what must hold"), rules)),
        headings="\n".join(markdown_lines(("meaning", "headings"), headings)),
        models="\n".join(markdown_lines(("model", "TFLOP a step, guidance included"), models)),
    )
