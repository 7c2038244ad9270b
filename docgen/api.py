"""The page docs/api.md: what `import vivace` offers, from its signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from typing import Any

from pydantic import BaseModel

import vivace
from vivace.evidence.recommendation.recommendation import RecipeFigures
from vivace.foundation.spec.profiling import OperatorTime, Profile
from vivace.foundation.spec.study import QualityRequest, WorkloadRequest
from vivace.foundation.stats.sequential import Decision
from vivace.report.latency import Latency
from vivace.report.profile_answer import ProfileChange
from vivace.report.rows import Row

_GROUPS: dict[str, tuple[tuple[str, Any], ...]] = {
    "Generate images": tuple(
        (f"vivace.{name}", getattr(vivace, name)) for name in ("load", "apply", "Session")
    ),
    "Compare recipes": (
        *(
            (f"vivace.{name}", getattr(vivace, name))
            for name in ("bench", "Run", "Study", "Timing", "compare", "Paired")
        ),
        ("vivace.foundation.spec.study.WorkloadRequest", WorkloadRequest),
        ("vivace.foundation.spec.study.QualityRequest", QualityRequest),
        ("vivace.report.rows.Row", Row),
        ("vivace.report.latency.Latency", Latency),
        ("vivace.foundation.stats.sequential.Decision", Decision),
    ),
    "Run a study": tuple(
        (f"vivace.{name}", getattr(vivace, name)) for name in ("study", "StudyRun", "StudyFile")
    ),
    "Profile a call": (
        ("vivace.profile", vivace.profile),
        ("vivace.Profiled", vivace.Profiled),
        ("vivace.foundation.spec.profiling.Profile", Profile),
        ("vivace.foundation.spec.profiling.OperatorTime", OperatorTime),
        ("vivace.report.profile_answer.ProfileChange", ProfileChange),
    ),
    "Choose a recipe": (
        *((f"vivace.{name}", getattr(vivace, name)) for name in ("recommend", "Recommendation")),
        ("vivace.evidence.recommendation.recommendation.RecipeFigures", RecipeFigures),
    ),
    "Prove that images are as good": tuple(
        (f"vivace.{name}", getattr(vivace, name)) for name in ("prove", "Proof")
    ),
    "Recipes, records and errors": tuple(
        (f"vivace.{name}", getattr(vivace, name)) for name in ("Recipe", "Record", "VivaceError")
    ),
}
_ABOUT = "Every name that `import vivace` offers, with its arguments; first, what most programs need."
_START = """
```python
import vivace

draw = vivace.load("tiny-sd", "tiny_vae+steps(20)")
draw("a red circle above a blue square").images[0].save("circle.png")

run = vivace.bench("tiny-sd", ["baseline", "tiny_vae", "steps(20)"])
print(run)  # tables and verdicts
best = max(run.rows(), key=lambda row: row.speedup.point if row.speedup else 1)
rows = run.to_dicts()  # or run.to_dataframe(), with pandas
open("page.html", "w").write(run.page())  # tables, charts and images in one file
open("times.svg", "w").write(run.charts()["times.svg"])  # a chart by itself

print(vivace.recommend("flux-dev", gpu="A100", max_memory="24GB"))  # from records; nothing is measured
```

An argument of another type is a `UsageError` that names it. A memory is `"12GB"`, `"12GiB"` or a number of GB; where
the name of an argument ends in `_bytes`, `_s` or `_minutes`, a number has that unit.

In a notebook, in IPython and on a terminal `bench`, `compare`, `prove`, `study` and `tune` show their progress on
standard error, unless they are given a receiver of it: `progress=vivace.benchmark.progress.SILENT` shows none. A
notebook shows each result as a page.
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def page(note: str) -> str:
    """Return the page as Markdown."""
    lines = [note, "# Python\n", _ABOUT, _START]
    for title, members in _GROUPS.items():
        lines += [f"## {title}\n"]
        for name, member in members:
            lines += [f"### {name}\n", *_entry(name.rpartition(".")[2], member)]
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, member: Any) -> list[str]:
    lines = [] if inspect.isclass(member) else [f"```py\n{name}{_signature(member)}\n```\n"]
    lines += [_markdown(inspect.getdoc(member) or ""), ""]
    if inspect.isclass(member):
        lines += _fields(member)
        for attribute, value in vars(member).items():
            if attribute.startswith("_") or not (about := _about(value)):
                continue
            is_call = inspect.isfunction(value) or isinstance(value, classmethod)
            entry = f"{attribute}(...)" if is_call else attribute
            lines.append(f"- `{name}.{entry}`: {about}")
        lines.append("")
    return lines


def _fields(member: type) -> list[str]:
    """Return the descriptions of a specification's fields, which are the help of the command line's options too."""
    if not issubclass(member, BaseModel):
        return []
    described = [
        f"- `{name}`: {field.description}" for name, field in member.model_fields.items() if field.description
    ]
    return ["**Fields:**\n", *described, ""] if described else []


def _about(member: object) -> str:
    """Return the first sentence of a method's or property's docstring; empty for anything else."""
    if not (inspect.isfunction(member) or isinstance(member, property | classmethod)):
        return ""
    return (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")


def _signature(member: Any) -> str:
    """Return the parameters, one a line if they are long. Annotations are strings, since evaluation is postponed."""
    parts = []
    keyword_only = False
    for parameter in inspect.signature(member).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parts.append("*")
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        annotation = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
        parts.append(f"{stars}{parameter.name}{annotation}{default}")
    text = ", ".join(parts)
    return f"({text})" if len(text) < 90 else "(\n    " + ",\n    ".join(parts) + ",\n)"


def _markdown(docstring: str) -> str:
    """Return a docstring with its sections as lists."""
    lines: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if line.rstrip(":") in _SECTIONS and line.endswith(":"):
            lines += [f"**{line}**", ""]
            inside = True
        elif inside and (match := re.match(r"    (\S[^:]*): (.*)", line)):
            names = ", ".join(f"`{part}`" for part in match.group(1).split(", "))
            lines.append(f"- {names}: {match.group(2)}")
        else:
            inside = inside and (line.startswith(" ") or not line)
            lines.append(line.replace("    ", "  ", 1) if inside else line)
    return "\n".join(lines)
