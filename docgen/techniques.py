"""The page docs/techniques.md: every technique with its knobs, from its declaration and its file's docstring."""

from __future__ import annotations

import inspect
import sys

from vivace.answers.markdown import markdown_lines
from vivace.recipes.describe import describe
from vivace.techniques import ALIASES, TECHNIQUES


def page(note: str) -> str:
    lines = [
        note,
        "# Techniques\n",
        "A recipe is a list of techniques, such as `bf16+attention(flash)+tiny_vae+steps(20)`. Their order does not "
        "matter: they are applied by stage. `vivace techniques` says which of them your machine can run.\n",
    ]
    rows = []
    described = [describe(technique, None) for technique in TECHNIQUES.values()]
    for row in described:
        picture = "same" if row["same_picture"] else "changes"
        targets = ", ".join(row["targets"]) or "the call"
        name = f"[`{row['name']}`](#{row['name']})"
        script = "plain" if row["has_script"] else "vivace's own"
        rows.append([name, row["summary"], row["stage"], picture, targets, script])
    lines += markdown_lines(("technique", "what", "stage", "image", "targets", "in a script"), rows)
    lines.append(
        "\n*Same*: arithmetic is only reordered or rounded; *changes*: the image may legitimately differ. *Plain*: "
        "[`vivace export`](export.md) writes it in public calls of diffusers, torch and torchao.\n"
    )
    lines.append(
        "Short names: "
        + ", ".join(f"`{a}` = `{n}" + (f"({v})`" if v else "`") for a, (n, v) in ALIASES.items())
        + ".\n"
    )
    for row, technique in zip(described, TECHNIQUES.values(), strict=True):
        essay = inspect.getdoc(sys.modules[technique.__module__]) or ""
        lines += [f"## {row['name']}\n", f"`{row['usage'].replace('|', ' | ')}`\n", _essay(essay), ""]
        if row["knobs"]:
            knobs = []
            for knob in row["knobs"]:
                default = "required" if knob["required"] else f"`{knob['default']}`"
                tune = ", ".join(f"`{value}`" for value in knob["tune"]) or "-"
                knobs.append([f"`{knob['name']}`", f"{knob['about']}{knob['limits']}", default, tune])
            lines += [*markdown_lines(("knob", "what", "default", "worth tuning"), knobs), ""]
        if row["targets"]:
            lines.append(
                f"Targets: {', '.join(row['targets'])}; by default {', '.join(row['default_targets'])}.\n"
            )
    return "\n".join(lines).rstrip() + "\n"


def _essay(text: str) -> str:
    """Return a docstring as Markdown; its labelled lines ("Why: ...") become a list."""
    lines = []
    for line in text.splitlines():
        label, colon, rest = line.partition(": ")
        if colon and label in {"Why", "Costs", "Needs", "Source"}:
            lines.append(f"- **{label}**: {rest}")
        else:
            lines.append(line.replace("    ", "  ", 1) if line.startswith("    ") else line)
    return "\n".join(lines) + "\n"
