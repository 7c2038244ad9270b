"""What more images decide where the gate is unclear, and how often looking again is wrong.

    python -m tinyworld.gate_looks draw --out build/gate-looks --record results/quality-gate-looks.json
    python -m tinyworld.gate_looks simulate

`draw` keeps the share of the CLIP margin of each image: 13 prompts at three seeds, then one each of 61 captions.
`simulate` draws prompts from them with replacement, moves all shares so that their capped mean lies at the limit, where
each verdict is wrong, and counts verdicts: of 39 images, and of 39, 65 and 100, stopping at the first that decides. The
rule for prompts that are lost as a whole is left out.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tinyworld import gate_pictures
from tinyworld.gate_pictures import SCORER, draw, figures_of
from tinyworld.gate_variants import NUM_SEEDS, SET_PICTURES, Variant, tasks, variants
from vivace import load
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate, Interval, gate, mean_interval
from vivace.measure.scorer import ClipScorer
from vivace.models.scorers import find_scorer
from vivace.report.fidelity import CAP
from vivace.report.variety import SURE_FAIL, SURE_PASS

RECORD = Path(__file__).parents[1] / "results/quality-gate-looks.json"
UNCLEAR = {
    "tiny-sd": ("guidance(8)", "steps(8)", "scheduler(dpmpp_2m)+steps(8)"),
    "tiny-flux": ("guidance(1)",),
}
"""Ruined recipes that 39 images leave unclear."""
LOOKS = (39, 65, 100)
PLAIN = ((SURE_PASS, SURE_FAIL),) * 3
STRICTER = (PLAIN[0], (0.98, 0.96), (0.98, 0.96))
"""How sure the gate is to pass and to fail at each look."""

Shares = NDArray[np.float64]


def draw_all(args: argparse.Namespace) -> None:
    """Draw, score, and record the share of the margin that each image keeps."""
    clip = ClipScorer(find_scorer(SCORER).folder)
    kept_rows = []
    for model, names in UNCLEAR.items():
        by_name = {variant.name: variant for variant in variants(model)}
        base = Variant(model, "baseline", "baseline", "recipe")
        pictures = {name: _drawn(args.out, name) for name in (base, *(by_name[name] for name in names))}
        rows = {name: figures_of(clip, name, pictures[name], pictures[base]) for name in pictures}
        own = np.array([row["alone"]["clip_score"] for row in rows[base]])
        margin = np.mean(
            [row["alone"]["clip_score"] - row["alone"]["clip_score_of_others"] for row in rows[base]]
        )
        for variant in list(pictures)[1:]:
            score = np.array([row["alone"]["clip_score"] for row in rows[variant]])
            kept = [round(float(share), 4) for share in 1 - (own - score) / margin]
            kept_rows.append({"model": model, "recipe": variant.name, "kept": kept})
    args.record.write_text(
        json.dumps({"scorer": find_scorer(SCORER).id, "rows": kept_rows}) + "\n", encoding="utf-8"
    )


def _drawn(out: Path, variant: Variant) -> NDArray[np.uint8]:
    path = out / variant.model / f"{variant.file}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        with load(variant.model, variant.name, device="cpu") as session:
            prompts, seeds = zip(*tasks(LOOKS[-1]), strict=True)
            np.savez_compressed(path, pictures=draw(session, prompts, seeds, gate_pictures.BATCH))
    pictures: NDArray[np.uint8] = np.load(path)["pictures"]
    return pictures


def at_limit(shares: Shares, limit: float) -> Shares:
    """Move all shares by the same so that their capped mean is the limit."""
    low, high = -1.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _capped(shares + middle).mean() < limit else (low, middle)
    return shares + low


def look(shares: Shares, prompts: Sequence[str], limit: float, sure: Sequence[tuple[float, float]]) -> Gate:
    """Return the first verdict that decides, or `unclear`; one look for each pair in `sure`."""
    verdict = Gate.UNCLEAR
    for number, (passes, fails) in zip(LOOKS, sure, strict=False):
        kept = list(_capped(shares[:number]))
        lower, upper = (mean_interval(kept, prompts[:number], 2 * share - 1) for share in (passes, fails))
        verdict = gate(Interval(lower.point, lower.low, upper.high), limit)
        if verdict is not Gate.UNCLEAR:
            break
    return verdict


def resampled(shares: Shares, limit: float | None, random: np.random.Generator) -> tuple[Shares, list[str]]:
    """Draw prompts with replacement, those of several seeds and those of one apart; `limit` moves each to it."""
    groups, single = shares[:SET_PICTURES].reshape(NUM_SEEDS, -1).T, shares[SET_PICTURES:]
    if limit is not None:
        groups, single = at_limit(groups, limit), at_limit(single, limit)
    of_set, others = (random.integers(0, len(part), len(part)) for part in (groups, single))
    names = [f"set {k}" for k in range(len(groups))] * NUM_SEEDS + [
        f"caption {k}" for k in range(len(single))
    ]
    return np.concatenate([groups[of_set].T.ravel(), single[others]]), names


def _capped(shares: Shares) -> Shares:
    return shares.clip(1 - CAP, 1 + CAP)


def simulate(args: argparse.Namespace) -> None:
    """Print how often each rule passes and fails, at the limit and for the images as they are."""
    limit = Limits().for_scorer(find_scorer(SCORER).id).clip
    assert isinstance(limit, float)
    rules = {"39": PLAIN[:1], "39, 65, 100": PLAIN, "39, 65, 100, stricter": STRICTER}
    for row in json.loads(args.record.read_text(encoding="utf-8"))["rows"]:
        shares = np.array(row["kept"])
        prompts = [prompt for prompt, _ in tasks(len(shares))]
        outcomes = {name: look(shares, prompts, limit, rule).value for name, rule in rules.items()}
        print(row["model"], row["recipe"], outcomes)
        for target in (limit, None):
            random = np.random.default_rng(0)
            counts = {name: Counter[str]() for name in rules}
            for _ in range(args.draws):
                drawn, names = resampled(shares, target, random)
                for name, rule in rules.items():
                    counts[name][look(drawn, names, limit, rule).value] += 1
            for name, count in counts.items():
                summary = ", ".join(
                    f"{count[outcome.value] / args.draws:.1%} {outcome.value}" for outcome in Gate
                )
                print(f"  {'at the limit' if target else 'as drawn'}, {name}: {summary}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("draw")
    part.add_argument("--out", type=Path, required=True)
    part.set_defaults(run=draw_all)
    part = parts.add_parser("simulate")
    part.add_argument("--draws", type=int, default=1000)
    part.set_defaults(run=simulate)
    for part in parts.choices.values():
        part.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
