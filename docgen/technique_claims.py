"""Published claims about techniques, and what the records say of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.technique_cases import (
    FAMILIES,
    recipe_of,
)
from docgen.technique_lines import Line
from vivace.answers.formatting import ratio


@dataclass(frozen=True)
class Claim:
    """A published claim, and the rows here that test it.

    models: those of the claim, and others that it may hold for.
    at_least, at_most: limits of each row's speed-up for the claim to hold.
    beats: a recipe that each row must be faster than for the claim to hold.
    why: the explanation of what is measured here.
    """

    says: str
    models: tuple[str, ...]
    recipes: tuple[str, ...]
    why: str
    at_least: float = 0.0
    at_most: float = math.inf
    beats: str | None = None

    def holds(self, line: Line, rival: Line | None) -> bool | None:
        """Return whether a row confirms the claim; None if its interval does not tell.

        Args:
            rival: the row of `beats`.
        """
        if line.speedup is None or line.speedup.low is None or line.speedup.high is None:
            return None
        low, high = line.speedup.low, line.speedup.high
        least, most = self.at_least, self.at_most
        if self.beats is not None:
            beaten = None if rival is None else rival.speedup
            if beaten is None or beaten.low is None or beaten.high is None:
                return None
            if low > beaten.high:
                return True
            return False if high < beaten.low else None
        if low >= least and high <= most:
            return True
        return False if high < least or low > most else None


CLAIMS = (
    Claim(
        "8-bit weights without compiling are slower than 16-bit ones (FLUX.1 [dev] on an H100: 12.20 s against "
        "10.32 s)",
        FAMILIES,
        ("quantize(int8)",),
        "the weights are dequantised in a separate pass before each matmul, and nothing fuses the two",
        at_most=0.95,
    ),
    Claim(
        "8-bit weights and compiling are faster than compiling alone (FLUX.1 [dev] on an H100: 5.46 s against 6.93 s)",
        ("flux-dev",),
        ("quantize(int8)+compile",),
        "matmuls of 4,608 tokens are compute-bound, and the compute is bf16 with either weights; dequantising them "
        "comes on top. vivace avoids inductor's kernel for a few rows ([footguns](footguns.md#quantisation))",
        beats="compile",
    ),
    Claim(
        "fp8 with static scales is twice as fast as fp16 on FLUX.1 [dev] (4.75 s against 9.45 s on a Blackwell)",
        ("flux-dev",),
        ("quantize(fp8_static)", "quantize(fp8_static)+compile"),
        "uncompiled, torchao's matmul scales, clamps and casts its inputs in separate passes",
        at_least=1.8,
    ),
    Claim(
        "every quantiser is slower than fp16 on SDXL",
        ("sdxl",),
        (
            *(
                f"quantize({scheme})"
                for scheme in ("int8", "int8_dynamic", "fp8_weight", "fp8_static", "nf4", "int4")
            ),
            "dtype(bf16)+quantize(fp8)",
        ),
        "convolutions are not quantised, and the kernels that dequantise and scale come on top of a step that is "
        "bound by kernel launches",
        at_most=0.95,
    ),
    Claim(
        "torchao's fp8 without compiling is no faster on FLUX.1 [dev] (7.28 s against 7.23 s on an H100)",
        ("flux-dev",),
        ("quantize(fp8)", "quantize(fp8_weight)"),
        "scaling the inputs in each call costs what the matmuls gain; weight-only fp8 is dequantised in each call",
        at_most=1.05,
    ),
)


def claims(measured: Mapping[str, Sequence[Line]]) -> list[str]:
    """Compare published claims with the rows here; empty without rows."""
    items = []
    for claim in CLAIMS:
        lines_by_model = {
            name: [
                line
                for recipe in claim.recipes
                for line in measured[name]
                if line.row.recipe == recipe_of(name, recipe) and line.speedup is not None
            ]
            for name in claim.models
        }
        if not any(lines_by_model.values()):
            continue
        holds = []
        for name, lines in lines_by_model.items():
            rivals = [
                line
                for line in measured[name]
                if claim.beats and line.row.recipe == recipe_of(name, claim.beats)
            ]
            holds += [claim.holds(line, rivals[0] if rivals else None) for line in lines]
        measured_ratios = "; ".join(
            f"{name}: {', '.join(f'`{line.row.recipe}` {ratio(line.speedup)}' for line in lines if line.speedup)}"
            for name, lines in lines_by_model.items()
            if lines
        )
        missing = [
            recipe
            for recipe in claim.recipes
            if not any(
                line.row.recipe == recipe_of(name, recipe)
                for name, lines in lines_by_model.items()
                for line in lines
            )
        ]
        still = (
            f" (still to be measured: {', '.join(f'`{recipe}`' for recipe in missing)})" if missing else ""
        )
        items.append(
            f"- *{claim.says}*: **{_verdict_of(holds)}**{still}. {measured_ratios}. Why: {claim.why}."
        )
    return ["## Published claims, tested here\n", *items, ""] if items else []


def _verdict_of(holds: Sequence[bool | None]) -> str:
    """Return the verdict on a claim from what its rows say: None where an interval does not tell."""
    if all(holds):
        return "confirmed"
    if all(value is False for value in holds):
        return "not confirmed"
    if True in holds and False in holds:
        return "confirmed in part"
    if True in holds:
        return "confirmed where the intervals tell"
    return "not confirmed where the intervals tell" if False in holds else "the intervals do not tell"
