"""Measurements that an owner of a card gives to everybody: comparisons without paths, names, prompts and images."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.record import Record

FORMAT = 1
SIGN_OFF = (
    "I measured these rows myself, on a machine that I may use for it, and give them to everybody under the licence of "
    "vivace (Apache-2.0)."
)
"""The statement that an owner makes with `--sign-off`; it is stored in the file."""
MAX_BYTES = 8_000_000
_NAME = re.compile(r"(synthetic:)?[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", re.ASCII)
_PERSONAL = re.compile(r"\\|~|://|^/|\.\.|^[A-Za-z]:")
"""Patterns of paths and addresses, which no contribution may contain."""
_MAX_TEXT = 2_000


Bounds = tuple[float, float | None, float | None]
"""An estimate, and its interval's lower and upper bound; None with too few images."""


class Closeness(Spec):
    """How close a recipe's images are to the baseline's: each figure with its interval.

    Attributes:
        clip, match: shares of the baseline's that the gate compares with its limits.
    """

    gate: str
    num_prompts: int = Field(ge=0)
    ssim: Bounds | None = None
    psnr_db: Bounds | None = None
    clip: Bounds | None = None
    match: Bounds | None = None


class ContributedRow(Spec):
    """One recipe of a comparison.

    Attributes:
        record: its raw samples, without what is personal.
        weights: how the components' weights are stored, by component, where the recipe changes that.
    """

    record: Record
    weights: dict[str, str] = Field(default={})
    closeness: Closeness | None = None


class Contributed(Spec):
    """One comparison on one model and machine, the baseline first."""

    rows: tuple[ContributedRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_one_comparison(self) -> Self:
        first = self.rows[0].record
        for row in self.rows:
            if row.record.environment != first.environment or row.record.trial.model != first.trial.model:
                raise ValueError("its rows are of different models or machines")
            if row.record.trial.workload != first.trial.workload:
                raise ValueError("its rows have different workloads")
            _check_is_anonymous(row.record)
        return self


class Contribution(Spec):
    """The content of a file that `vivace contribute` writes."""

    vivace_contribution: Literal[1] = 1
    sign_off: str
    comparisons: tuple[Contributed, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_signed_off_and_anonymous(self) -> Self:
        if self.sign_off != SIGN_OFF:
            raise ValueError(f"sign_off is not the statement of vivace contribute --sign-off: {SIGN_OFF}")
        for text in _texts(self.model_dump(mode="json", exclude={"sign_off"})):
            if len(text) > _MAX_TEXT or not text.isprintable() or _PERSONAL.search(text):
                raise ValueError(
                    f"{text[:60]!r} looks like a path or an address, which contributions do not have"
                )
        return self


def prompt_names(number: int) -> tuple[str, ...]:
    """Return the names that replace prompts."""
    return tuple(f"prompt {k}" for k in range(1, number + 1))


def why_personal(record: Record) -> str | None:
    """Return why a record's model or recipe cannot be given to others; None if it can."""
    model = record.trial.model
    if model.source in ("folder", "file") or not _NAME.fullmatch(model.name):
        return "its model is a folder or a file of this machine"
    for technique in record.trial.recipe.techniques:
        for name, value in technique.knobs.items():
            if isinstance(value, str) and (
                "/" in value or _PERSONAL.search(value) or value.endswith(".safetensors")
            ):
                return f"{name} of {technique.name} names a file"
    if record.trial.workload.task != "text":
        return "it starts from images"
    return None


def _check_is_anonymous(record: Record) -> None:
    workload, environment, rounds = record.trial.workload, record.environment, record.rounds
    conditions = [value for each in rounds for value in each.conditions.values()]
    reasons = [each.reason or (each.gpu and each.gpu.reason) for each in rounds]
    problems = {
        "it has prompts": workload.prompts != prompt_names(len(workload.prompts)),
        "it names variables or the place of the machine": environment.variables or environment.place,
        "it has images, or texts of techniques": any(
            each.pictures or each.effects or each.evidence or each.warnings for each in rounds
        ),
        "it has conditions in words": any(isinstance(value, str) for value in conditions),
        "it has a reason in words": any(reason is not None for reason in reasons),
    }
    reason = why_personal(record) or next((problem for problem, is_so in problems.items() if is_so), None)
    if reason is not None:
        raise ValueError(f"a row of {record.trial.recipe.text[:80]} cannot be taken: {reason}")


def _texts(content: Any) -> Iterator[str]:
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            left += value
