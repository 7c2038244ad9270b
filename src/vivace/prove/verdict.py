"""The verdict on one question, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether a claim holds."""

    PROVEN = "proven"
    FAILED = "failed"
    UNCLEAR = "cannot tell"
    LEFT_OUT = "not checked"


@dataclass(frozen=True)
class Answer:
    """The verdict on a question, and the reason as part of a sentence."""

    verdict: Verdict
    reason: str
