"""What docs/compatibility.md says of each family of models, from `vivace.architectures`."""

from __future__ import annotations

from vivace.answers.markdown import markdown_lines
from vivace.architectures import FAMILIES
from vivace.architectures.family import Family

START, END = "<!-- families -->\n", "<!-- end -->"
_HEADINGS = ("family", "models by name", "besides text", "single files", "steps skipped by", "`fused`")


def filled(page: str) -> str:
    """Return docs/compatibility.md with the table of the families."""
    before, rest = page.split(START)
    table = "\n".join(markdown_lines(_HEADINGS, [_cells(family) for family in FAMILIES]))
    return f"{before}{START}{table}\n{END}{rest.split(END, 1)[1]}"


def _cells(family: Family) -> list[str]:
    tasks = dict.fromkeys(task for pipeline in family.pipelines for task in pipeline.tasks)
    files = dict.fromkeys(each.what for each in family.files.signatures if each.entry) if family.files else ()
    return [
        family.name,
        ", ".join(f"`{model.entry.name}`" for model in family.models),
        ", ".join(tasks) or "-",
        ", ".join(files) or "-",
        "step caches" if family.blocks is not None else "`deepcache`",
        "yes" if family.fused else "-",
    ]
