"""The verdict on one question, with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ProofVerdict(StrEnum):
    """Whether a claim holds."""

    PROVEN = "proven"
    FAILED = "failed"
    UNCLEAR = "cannot tell"
    LEFT_OUT = "not checked"


@dataclass(frozen=True)
class ProofAnswer:
    """The verdict on a question, and the reason as part of a sentence."""

    verdict: ProofVerdict
    reason: str

    @property
    def word(self) -> str:
        """The answer to the question, e.g. "yes" or "cannot tell"."""
        return {ProofVerdict.PROVEN: "yes", ProofVerdict.FAILED: "no"}.get(self.verdict, self.verdict.value)


def decide(*rules: tuple[object, ProofVerdict, str]) -> ProofAnswer:
    """Return the verdict and the reason of the first rule whose condition holds; that of the last must."""
    return next(ProofAnswer(verdict, reason) for holds, verdict, reason in rules if holds)
