"""Measure what the gate says of variety: collapsed images, good recipes, and the baseline at other seeds.

    python -m tinyworld.calibrate_gate draw --out build/gate
    python -m tinyworld.gate_variety draw --out build/gate       the baseline at other seeds
    python -m tinyworld.gate_variety judge --out build/gate      writes results/quality-gate-variety.json
    python -m tinyworld.gate_variety table                       writes the table of docs/quality.md

A *collapse* is done to the baseline's images of 13 prompts at three seeds: seeds or prompts lose their differences. The
kinds in CALIBRATED were looked at when the limit was chosen, those in HELD_OUT were not. What is as varied: the recipes
of the gate's benchmark that may give another image and are not ruined, and the baseline at other seeds, drawn SPLITS
times: three seeds are compared with three others. No other part of the gate has a say here.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import vivace
from tinyworld import gate_pictures
from tinyworld.collapses import CALIBRATED, HELD_OUT, PROMPTS, Images
from tinyworld.gate_pictures import SCORER, draw, embeddings_of, mine
from tinyworld.gate_tables import replaced
from tinyworld.gate_variants import SET_PICTURES, Variant, variants
from vivace.foundation.spec.figures import ImageFigures, packed
from vivace.foundation.spec.limits import VARIETY_LIMIT
from vivace.foundation.stats import Gate
from vivace.measure.image_metrics import pixels, thumbnail
from vivace.measure.scorer import ClipScorer
from vivace.models.prompts import NUM_SEEDS
from vivace.models.scorers import find_scorer
from vivace.report.quality_gate import judge_variety
from vivace.report.variety import variety

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results/quality-gate-variety.json"
MORE_SETS = {"tiny-flux-schnell": 4, "tiny-flux": 3, "tiny-sd": 2}
"""How often the baseline is drawn at three other seeds."""
SPLITS = 200

Described = list[tuple[str, str]]
"""Of each image, its packed thumbnail and embedding."""


def draw_all(args: argparse.Namespace) -> None:
    """Draw the baseline at other seeds."""
    for model, number in MORE_SETS.items():
        for k in range(number):
            path = other_seeds(args.out, model, k)
            with mine(path) as is_mine:
                if not is_mine:
                    continue
                tasks = [(p, NUM_SEEDS * (1 + k) + seed) for seed in range(NUM_SEEDS) for p in PROMPTS]
                prompts, seeds = zip(*tasks, strict=True)
                with vivace.load(model, "baseline", device="cpu") as session:
                    pictures = draw(session, prompts, seeds, gate_pictures.BATCH)
                unfinished = path.with_suffix(".part")
                with unfinished.open("wb") as file:
                    np.savez_compressed(file, pictures=pictures)
                unfinished.rename(path)
                print(model, path.name, flush=True)


def other_seeds(out: Path, model: str, number: int) -> Path:
    return out / model / f"other-seeds-{number}.npz"


def described(clip: ClipScorer, images: Images) -> Described:
    """Return what the quality pass stores of each image to compare it with the others."""
    vectors = embeddings_of(clip, images)
    return [
        (packed(thumbnail(pixels(image))), packed(vector))
        for image, vector in zip(images, vectors, strict=True)
    ]


def verdict_of(of_recipe: Described, of_baseline: Described) -> dict[str, Any]:
    """Return the verdict, the mean share with its bounds, and the lowest share."""
    prompts = [prompt for _ in range(NUM_SEEDS) for prompt in PROMPTS]
    figures, references = (
        [
            ImageFigures(
                sha256=f"{side}/{k}",
                reference=f"a/{k}",
                prompt=prompt,
                alone={},
                against={},
                thumbnail=small,
                embedding=vector,
            )
            for k, (prompt, (small, vector)) in enumerate(zip(prompts, of, strict=True))
        ]
        for side, of in (("b", of_recipe), ("a", of_baseline))
    )
    measured = variety(figures, references)
    assert measured is not None, "every image has a thumbnail"
    judgement = judge_variety(measured, VARIETY_LIMIT)
    assert judgement is not None, "13 prompts have several seeds"
    bounds = measured.bounds
    assert bounds.low is not None
    assert bounds.high is not None
    return {
        "verdict": judgement.gate.value,
        "kept": [round(x, 3) for x in (bounds.low, bounds.point, bounds.high)],
        "why": judgement.reason,
    }


def rows_of(out: Path, model: str, clip: ClipScorer) -> Iterator[dict[str, Any]]:
    base = _drawn(out, Variant(model, "baseline", "baseline", "recipe"))
    assert base is not None, f"the baseline of {model} is not drawn"
    baseline = described(clip, base)
    for half, kinds in (("calibrated", CALIBRATED), ("held out", HELD_OUT)):
        for name, collapse in kinds.items():
            verdict = verdict_of(described(clip, collapse(base)), baseline)
            yield {"model": model, "variant": name, "half": half, "label": "collapsed"} | verdict
    labels = {
        (row["model"], row["variant"], row["held_to"]): row["label"]
        for row in json.loads((ROOT / "results/quality-gate.json").read_text(encoding="utf-8"))["rows"]
    }
    for variant in variants(model):
        label = labels.get((model, variant.name, "another picture"))
        if variant.sort == "images" or label not in ("good", "between"):
            continue
        images = _drawn(out, variant)
        if images is not None:
            verdict = verdict_of(described(clip, images), baseline)
            yield {"model": model, "variant": variant.name, "half": "recipes", "label": label} | verdict


def splits_of(out: Path, model: str, clip: ClipScorer) -> dict[str, Any]:
    """Compare the baseline at three seeds of each prompt with itself at three others, SPLITS times."""
    base = _drawn(out, Variant(model, "baseline", "baseline", "recipe"))
    assert base is not None
    sets = [base]
    for k in range(MORE_SETS[model]):
        with np.load(other_seeds(out, model, k)) as stored:
            sets.append(stored["pictures"])
    # (all seeds, prompts)
    sets_described = [described(clip, images) for images in sets]
    of_seed = [
        described_set[k * len(PROMPTS) : (k + 1) * len(PROMPTS)]
        for described_set in sets_described
        for k in range(NUM_SEEDS)
    ]
    random = np.random.default_rng(0)
    counts: Counter[str] = Counter()
    for _ in range(SPLITS):
        order = np.stack([random.permutation(len(of_seed)) for _ in PROMPTS], axis=1)
        sides = [
            [of_seed[order[row, p]][p] for row in rows for p in range(len(PROMPTS))]
            for rows in (range(NUM_SEEDS), range(NUM_SEEDS, 2 * NUM_SEEDS))
        ]
        counts[verdict_of(*sides)["verdict"]] += 1
    return {"model": model, "splits": SPLITS} | {gate.value: counts[gate.value] for gate in Gate}


def _drawn(out: Path, variant: Variant) -> Images | None:
    path = out / variant.model / f"{variant.file}.npz"
    if not path.exists():
        return None
    with np.load(path) as stored:
        pictures: Images = stored["pictures"][:SET_PICTURES]
    return pictures if len(pictures) == SET_PICTURES else None


def judge_all(args: argparse.Namespace) -> None:
    """Judge everything that is drawn, and write the record."""
    scorer = find_scorer(SCORER)
    clip = ClipScorer(scorer.folder)
    rows = []
    for model in MORE_SETS:
        for row in rows_of(args.out, model, clip):
            rows.append(row)
            print(row["model"], row["variant"], row["verdict"], row["kept"], flush=True)
    splits = [splits_of(args.out, model, clip) for model in MORE_SETS]
    head = {"scorer": scorer.id, "limit": VARIETY_LIMIT, "other_seeds": splits}
    lines = ",\n".join(json.dumps(row) for row in rows)
    args.record.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def tables(record: dict[str, Any]) -> str:
    """Return the table of docs/quality.md."""
    lines = ["| images | variants | failed | unclear | passed |", "| --- | --- | --- | --- | --- |"]
    for title, half, label in (
        ("collapsed, calibrated", "calibrated", "collapsed"),
        ("collapsed, held out", "held out", "collapsed"),
        ("recipes, good", "recipes", "good"),
        ("recipes, between", "recipes", "between"),
    ):
        counts = Counter(
            row["verdict"] for row in record["rows"] if (row["half"], row["label"]) == (half, label)
        )
        cells = [sum(counts.values()), *(counts[g] for g in ("failed", "unclear", "passed"))]
        lines.append(f"| {title} | {' | '.join(map(str, cells))} |")
    for row in record["other_seeds"]:
        cells = [row[name] for name in ("splits", "failed", "unclear", "passed")]
        lines.append(f"| {row['model']} at other seeds | {' | '.join(map(str, cells))} |")
    missed = [
        f"{row['model']}, *{row['variant']}*: {row['verdict']}"
        for row in record["rows"]
        if row["label"] == "collapsed" and row["verdict"] != "failed"
    ]
    return (
        "\n".join(lines) + "\n\n" + (f"Not failed: {'; '.join(missed)}." if missed else "All collapses fail.")
    )


def write_tables(args: argparse.Namespace) -> None:
    page = ROOT / "docs/quality.md"
    page.write_text(
        replaced(
            page.read_text(encoding="utf-8"),
            "gate variety",
            tables(json.loads(args.record.read_text(encoding="utf-8"))),
        ),
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    for name, run in (("draw", draw_all), ("judge", judge_all)):
        part = parts.add_parser(name)
        part.add_argument("--out", type=Path, required=True)
        part.set_defaults(run=run)
    parts.add_parser("table").set_defaults(run=write_tables)
    for part in parts.choices.values():
        part.add_argument("--record", type=Path, default=RECORD)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
