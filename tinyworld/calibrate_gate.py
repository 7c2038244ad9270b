"""Measure the quality gate: its verdicts on good and ruined images, compared with the truth.

    python -m tinyworld.calibrate_gate draw --out build/gate            images of recipes, and with noise on the weights
    python -m tinyworld.calibrate_gate look --out build/gate            figures of all images, the verifier's verdict
    python -m tinyworld.calibrate_gate fit --out build/gate             which limits suit the calibrated half
    python -m tinyworld.calibrate_gate judge --out build/gate --record results/quality-gate.json
    python -m tinyworld.calibrate_gate table                            writes the tables of docs/quality.md

A *variant* is a recipe, noise on the weights, or damage done to the baseline's finished images (`damage.py`). Kinds of
variants are split in two halves by a hash of their name: limits are chosen on one, and the page reports the other.
Kinds that were added after the rules were settled ("later") are a test that nobody had seen before.

The truth is the exact verifier's accuracy (everything right), paired with the baseline's: over 500 held-out captions
for recipes that were measured so on a GPU (`results/quality-gate-truth.json`), else over 100. A variant that loses 10
points or more is ruined, one that loses less than 2 is good; those between count as neither. The gate sees none of it:
it sees the 13 prompts of the prompt set "tinyworld" at one or three seeds, or 100 captions at one seed.

Whatever exists is kept, so an interrupted run resumes. Images are generated in batches, each from its own seed. A step
cache then decides for a whole batch.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from tinyworld import gate_tables
from tinyworld.gate_cases import cases
from tinyworld.gate_pictures import SCORER, draw_all, look_at_all
from tinyworld.gate_tables import HALVES, tally, write_tables
from tinyworld.gate_variants import CALIBRATED, RECIPES, SET_PICTURES
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate
from vivace.models.scorers import find_scorer
from vivace.report.fidelity import KeptShare

CLIP_LIMITS, MATCH_LIMITS = (0.97, 0.98, 0.985, 0.99, 0.995), (0.8, 0.85, 0.9, 0.95, 0.97)


def fit_all(args: argparse.Namespace) -> None:
    """Print how often the gate is right on the calibrated half, by limit. Passed ruined images weigh most."""
    calibrated = [case for case in cases(args.out) if case.half == "calibrated" and case.label != "between"]
    for match_limit in MATCH_LIMITS:
        for clip_limit in CLIP_LIMITS:
            limits = Limits(clip=clip_limit, match=match_limit)
            gates = [
                (case.label, verdict[0].gate) for case in calibrated if (verdict := case.verdict(39, limits))
            ]
            counts = {
                f"{label} {gate.value}": sum(pair == (label, gate) for pair in gates)
                for label in ("ruined", "good")
                for gate in Gate
            }
            print(f"match {match_limit:.2f}, clip {clip_limit:.3f}:", counts, flush=True)


def judge_all(args: argparse.Namespace) -> None:
    """Judge every variant with the gate, as the report does, and count how often it is right."""
    scorer = find_scorer(SCORER)
    limits = Limits().for_scorer(scorer.id)
    every_case = list(cases(args.out))
    rows = []
    for case in every_case:
        row: dict[str, Any] = {
            "model": case.variant.model,
            "kind": case.variant.kind,
            "variant": case.variant.name,
            "held_to": case.held_to,
            "half": case.half,
            "fall": round(case.fall, 4),
            "captions": case.num_judged,
            "label": case.label,
        }
        for number in gate_tables.NUMBERS:
            verdict = case.verdict(number, limits)
            if verdict is None:
                continue
            judgement, close = verdict
            row[str(number)] = judgement.gate.value
            if number == SET_PICTURES:
                row["why"] = judgement.reason
                row["clip"] = ends(None if close is None else close.clip)
                row["match"] = ends(None if close is None else close.match)
        rows.append(row)
    result = {
        "scorer": scorer.id,
        "limits": limits.model_dump(mode="json"),
        "calibrated_kinds": sorted(CALIBRATED),
        "tally": tally(rows),
        "rows": rows,
    }
    for number in gate_tables.NUMBERS:
        for half in HALVES:
            print(number, half, result["tally"][str(number)][half])
    if args.record:
        lines = ",\n".join("  " + json.dumps(row) for row in result.pop("rows"))
        head = json.dumps(result, indent=1)[:-2]
        args.record.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")


def ends(kept: KeptShare | None) -> list[float | None] | None:
    """Return the gate's lower bound, its mean and its upper bound."""
    if kept is None:
        return None
    bounds = kept.bounds
    return [None if x is None else round(x, 4) for x in (bounds.low, bounds.point, bounds.high)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("draw")
    part.add_argument("--model", nargs="*", choices=RECIPES, help="default: all")
    part.set_defaults(run=draw_all)
    part = parts.add_parser("look")
    part.add_argument("--model", nargs="*", choices=RECIPES, help="default: all")
    part.set_defaults(run=look_at_all)
    parts.add_parser("fit").set_defaults(run=fit_all)
    part = parts.add_parser("judge")
    part.add_argument("--record", type=Path)
    part.set_defaults(run=judge_all)
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, required=True)
    parts.add_parser("table").set_defaults(run=write_tables)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
