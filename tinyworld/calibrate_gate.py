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
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vivace
from tinyworld import damage, evaluate, verifier
from vivace.errors import VivaceError
from vivace.measure.quality import aligned, faults, match, pixels
from vivace.measure.scorer import ClipScorer
from vivace.models.prompts import NUM_SEEDS, PROMPT_SETS
from vivace.models.scorers import find_scorer
from vivace.recipes.resolve import resolve
from vivace.report.gate import Judgement, broken, judge_figures
from vivace.report.quality import Fidelity, Kept, PairedFigures, fidelity
from vivace.runtime.session import Session
from vivace.spec.figures import SAME_PIXELS, PictureFigures
from vivace.spec.limits import Limits
from vivace.stats import Gate

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results/quality-gate.json", ROOT / "docs/quality.md"
TRUTH = ROOT / "results/quality-gate-truth.json"
PROMPT_SET = "tinyworld"
SCORER = "tiny-clip"
RUINED, GOOD = 0.10, 0.02  # falls of accuracy
LABELS, HALVES = ("ruined", "between", "good"), ("calibrated", "held out", "later")
GATES = tuple(gate.value for gate in Gate)
NUMBERS = (13, 39, 100)
SET_PICTURES, MOST_PICTURES = 39, 100
BATCH, CACHE_BATCH = 25, 13

_STEPS = {
    "tiny-sd": (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
    "tiny-flux": (1, 2, 3, 4, 5, 6, 8, 10, 14),
    "tiny-flux-schnell": (1, 2, 3, 8),
}
_GUIDANCE = {"tiny-sd": (0, 6, 8, 10, 20), "tiny-flux": (0, 1, 2, 5), "tiny-flux-schnell": ()}
RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    model: {
        "precision": ("int8", "int4", *(("bf16",) if model == "tiny-flux-schnell" else ())),
        "decoder": (
            "tiny_vae",
            *(("int8+tiny_vae", "int4+tiny_vae") if model == "tiny-flux-schnell" else ()),
        ),
        "steps": tuple(f"steps({n})" for n in _STEPS[model]),
        "guidance": tuple(f"guidance({g})" for g in _GUIDANCE[model]),
    }
    for model in _STEPS
}
"""Recipes by model and kind."""
RECIPES["tiny-sd"] |= {
    "cutoff": ("cfg_cutoff(0.2)", "cfg_cutoff(0.6)"),
    "scheduler": ("scheduler(dpmpp_2m)+steps(12)", "scheduler(euler)+steps(8)"),
    "scheduler and steps": tuple(f"scheduler(dpmpp_2m)+steps({n})" for n in (2, 4, 6, 8)),
    "several": ("tiny_vae+steps(3)", "int4+steps(4)", "cfg_cutoff(0.2)+steps(6)"),
}
RECIPES["tiny-flux"] |= {
    "cache": tuple(f"first_block_cache({t})" for t in (0.1, 0.2, 0.3, 0.5, 0.8, 1.5)),
    "cache hits": tuple(f"first_block_cache(hits={h})" for h in (0.5, 0.8, 0.9)),
    "several": ("tiny_vae+steps(3)", "int4+steps(4)"),
}
RECIPES["tiny-flux-schnell"] |= {"several": ("tiny_vae+steps(2)", "int8+steps(3)")}

LATER_RECIPES: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny-sd": {
        "deepcache": ("deepcache(2)", "deepcache(5)", "deepcache(10)"),
        "merging": ("token_merging(0.25)", "token_merging(0.5)", "token_merging(0.75)"),
    },
    "tiny-flux": {"pruning": ("prune(0.1)", "prune(0.3)")},
    "tiny-flux-schnell": {"pruning": ("prune(0.1)", "prune(0.2)", "prune(0.4)")},
}
"""Recipes of kinds that were added after the rules were settled."""


@dataclass(frozen=True)
class Variant:
    """One way to get images: a recipe's text, or the name of a damage.

    `sort` is "recipe", "weights" or "images".
    """

    model: str
    kind: str
    name: str
    sort: str

    @property
    def file(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()[:16]


def variants(model: str) -> Iterator[Variant]:
    """Yield everything the gate is tried on; the first is the baseline."""
    yield Variant(model, "baseline", "baseline", "recipe")
    for kind, names in (RECIPES[model] | LATER_RECIPES.get(model, {})).items():
        yield from (Variant(model, kind, resolve(name).text, "recipe") for name in names)
    for kind, noises in damage.WEIGHTS.items():
        chosen = (
            list(noises) if model == "tiny-flux-schnell" else list(noises)[1::2]
        )  # the others take long to draw
        yield from (Variant(model, kind, name, "weights") for name in chosen)
    for kind, damages in (damage.IMAGE | damage.LATER_IMAGE).items():
        yield from (Variant(model, kind, name, "images") for name in damages)


@cache
def tasks(number: int = MOST_PICTURES) -> list[tuple[str, int]]:
    """Return (prompt, seed) of images: the prompt set at each seed, then held-out captions at one."""
    seen = [(prompt, seed) for seed in range(NUM_SEEDS) for prompt in PROMPT_SETS[PROMPT_SET]]
    captions = evaluate.held_out_captions(500)[: MOST_PICTURES - len(seen)]
    return (seen + [(caption, evaluate.PICTURE_SEED + k) for k, caption in enumerate(captions)])[:number]


def num_drawn(variant: Variant) -> int:
    """Return how many images of a variant are drawn: the models of many steps take long."""
    return MOST_PICTURES if variant.model == "tiny-flux-schnell" else SET_PICTURES


def draw(session: Session, prompts: Sequence[str], seeds: Sequence[int], batch: int) -> NDArray[np.uint8]:
    """Generate images (N, H, W, 3), each from its own seed. Values that are not finite become black, as with PIL."""
    made = []
    for start in range(0, len(prompts), batch):
        some = list(prompts[start : start + batch])
        generators = [torch.Generator("cpu").manual_seed(s) for s in seeds[start : start + batch]]
        images = session(some, generator=generators, output_type="np").images
        made.append(np.round(np.nan_to_num(images) * 255).clip(0, 255).astype(np.uint8))
    return np.concatenate(made)


def draw_all(args: argparse.Namespace) -> None:
    for model in args.model or RECIPES:
        for variant in variants(model):
            path = args.out / model / f"{variant.file}.npz"
            claim = path.with_suffix(".lock")
            if variant.sort == "images" or path.exists():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            try:  # several of these commands can share the work
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            start = time.perf_counter()
            try:
                pictures, reason = draw_variant(variant), ""
            except VivaceError as error:
                pictures, reason = np.zeros((0, 128, 128, 3), np.uint8), str(error)
            unfinished = path.with_suffix(".part")
            with unfinished.open("wb") as file:
                np.savez_compressed(file, pictures=pictures, reason=np.array(reason))
            unfinished.rename(path)
            claim.unlink()
            print(f"{model} {variant.name}: {time.perf_counter() - start:.1f} s {reason}", flush=True)


def draw_variant(variant: Variant) -> NDArray[np.uint8]:
    recipe = variant.name if variant.sort == "recipe" else "baseline"
    with vivace.load(variant.model, recipe, device="cpu") as session:
        if variant.sort == "weights":
            damage.spoil(session, *damage.WEIGHTS[variant.kind][variant.name])
        prompts, seeds = zip(*tasks(num_drawn(variant)), strict=True)
        return draw(session, prompts, seeds, CACHE_BATCH if "cache" in recipe else BATCH)


def look_at_all(args: argparse.Namespace) -> None:
    """Store the figures of every image beside it, and whether the verifier finds everything right in it."""
    clip = ClipScorer(find_scorer(SCORER).folder)
    others = clip.embed_prompts(PROMPT_SETS[PROMPT_SET])
    for model in args.model or RECIPES:
        drawn = load(args.out, Variant(model, "baseline", "baseline", "recipe"))
        if drawn is None:
            continue
        prompts = [prompt for prompt, _ in tasks()[: len(drawn)]]
        read = clip.embed_prompts(prompts)
        for variant in variants(model):
            path = args.out / model / f"{variant.file}.json"
            if path.exists():
                continue
            if variant.sort == "images":
                damages = damage.IMAGE | damage.LATER_IMAGE
                pictures: NDArray[np.uint8] | None = damages[variant.kind][variant.name](drawn, prompts)
            else:
                pictures = load(args.out, variant)
            if pictures is None:
                continue
            rows = []
            near = [aligned(pixels(one), pixels(other)) for one, other in zip(pictures, drawn, strict=True)]
            seen = seen_by(clip, np.stack(near).astype(np.uint8))
            for k, picture in enumerate(pictures):
                alone = {"clip_score": 100 * float(seen[k] @ read[k])}
                against: dict[str, float] = {}
                if variant.kind == "baseline":
                    strangers = [
                        float(seen[k] @ other)
                        for prompt, other in zip(PROMPT_SETS[PROMPT_SET], others, strict=True)
                        if prompt != prompts[k]
                    ]
                    alone["clip_score_of_others"] = 100 * float(np.mean(strangers))
                elif (picture != drawn[k]).any():
                    against["match"] = match(pixels(picture), pixels(drawn[k]))
                rows.append(
                    {
                        "faults": faults(pixels(picture)),
                        "alone": rounded(alone),
                        "against": rounded(against),
                        "right": verifier.verify(np.ascontiguousarray(picture), prompts[k]).right,
                    }
                )
            path.with_suffix(".tmp").write_text(json.dumps(rows) + "\n")
            path.with_suffix(".tmp").rename(path)
            print(model, variant.name, sum(row["right"] for row in rows), flush=True)


def load(out: Path, variant: Variant) -> NDArray[np.uint8] | None:
    """Return the images of a variant; None if they are not drawn, or cannot be."""
    path = out / variant.model / f"{variant.file}.npz"
    if not path.exists():
        return None
    with np.load(path) as stored:
        pictures: NDArray[np.uint8] = stored["pictures"]
    return pictures[: num_drawn(variant)] if len(pictures) else None


def seen_by(clip: ClipScorer, pictures: NDArray[np.uint8]) -> NDArray[np.float64]:
    images = [Image.fromarray(np.ascontiguousarray(picture)) for picture in pictures]
    return np.concatenate([clip.embed_pictures(images[k : k + 20]) for k in range(0, len(images), 20)])


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


KINDS = sorted(
    {kind for kinds in (*RECIPES.values(), damage.WEIGHTS, damage.IMAGE) for kind in kinds},
    key=lambda kind: hashlib.sha256(kind.encode()).hexdigest(),
)
CALIBRATED = frozenset(KINDS[: len(KINDS) // 2])
"""The kinds on which limits are chosen; the others are held out."""
LATER = frozenset(kind for kinds in (*LATER_RECIPES.values(), damage.LATER_IMAGE) for kind in kinds)


def half_of(kind: str) -> str:
    return "later" if kind in LATER else "calibrated" if kind in CALIBRATED else "held out"


HARMLESS_SHARE = 0.003  # of noise on weights


@dataclass(frozen=True)
class Case:
    """A variant as the gate sees it, with the truth.

    Attributes:
        held_to: "same picture" or "another picture": the two sets of requirements.
        fall: of the verifier's accuracy.
        num_judged: captions that the truth comes from.
        label: "ruined", "good" or "between".
    """

    variant: Variant
    held_to: str
    fall: float
    num_judged: int
    label: str
    figures: tuple[PictureFigures, ...]
    references: tuple[PictureFigures, ...]
    faults: tuple[tuple[str, ...], ...]

    @property
    def half(self) -> str:
        return half_of(self.variant.kind)

    def judged(self, number: int, limits: Limits) -> tuple[Judgement, Fidelity | None] | None:
        """Return the gate's verdict from the first images; None if fewer were drawn."""
        if number > len(self.figures):
            return None
        found = fidelity(PairedFigures(self.figures[:number], self.references[:number]))
        said = broken(self.faults[:number])
        if said is not None:
            return Judgement(Gate.FAILED, said, "broken"), found
        assert found is not None
        return judge_figures(found, None, limits, same_picture=self.held_to == "same picture"), found


def cases(out: Path) -> Iterator[Case]:
    """Yield every variant whose images were looked at, once for each set of requirements that applies to it."""
    truth = json.loads(TRUTH.read_text())
    known = {(row["model"], row["recipe"]): row["fall"] for row in truth["rows"]}
    for model in RECIPES:
        base = stored_rows(out, Variant(model, "baseline", "baseline", "recipe"))
        if base is None:
            continue
        for variant in variants(model):
            rows = stored_rows(out, variant)
            if rows is None or variant.kind == "baseline":
                continue
            fall = (sum(row["right"] for row in base[: len(rows)]) - sum(row["right"] for row in rows)) / len(
                rows
            )
            judged = len(rows)
            if variant.sort == "recipe" and (model, variant.name) in known:
                fall, judged = known[model, variant.name], truth["captions"]
            label = "ruined" if fall >= RUINED else "good" if fall < GOOD else "between"
            if variant.kind == "one prompt":
                label = "ruined"  # by construction: whoever asks for that prompt never gets it
            paired = [
                as_figures(k, row, other) for k, (row, other) in enumerate(zip(rows, base, strict=False))
            ]
            figures, references = zip(*paired, strict=True)
            excused = [
                () if other["faults"] else tuple(row["faults"])
                for row, other in zip(rows, base, strict=False)
            ]
            for held_to in requirements(variant, label):
                yield Case(variant, held_to, fall, judged, label, figures, references, tuple(excused))


def requirements(variant: Variant, label: str) -> list[str]:
    """Return what a variant is held to: recipes to their own, damage to both.

    Weights with more than a trace of noise give another image, which may be as good: that fails no promise.
    """
    if variant.sort == "recipe":
        return ["same picture" if resolve(variant.name).spec.same_picture else "another picture"]
    if variant.sort == "weights" and label != "ruined":
        share = damage.WEIGHTS[variant.kind][variant.name][1]
        return ["same picture", "another picture"] if share <= HARMLESS_SHARE else ["another picture"]
    return ["same picture", "another picture"]


def stored_rows(out: Path, variant: Variant) -> list[dict[str, Any]] | None:
    path = out / variant.model / f"{variant.file}.json"
    return json.loads(path.read_text()) if path.exists() else None


def as_figures(
    number: int, row: dict[str, Any], original: dict[str, Any]
) -> tuple[PictureFigures, PictureFigures]:
    """Return the figures of an image and of its reference, as the quality pass stores them."""
    prompt, _ = tasks()[number]
    key = {"reference": f"a/{number}", "prompt": prompt, "scorer": SCORER}
    return (
        PictureFigures(
            **key,
            sha256=f"b/{number}",
            alone=row["alone"],
            against=row["against"],
            reason=None if row["against"] else SAME_PIXELS,
        ),
        PictureFigures(**key, sha256=f"a/{number}", alone=original["alone"], against={}),
    )


CLIP_LIMITS, MATCH_LIMITS = (0.97, 0.98, 0.985, 0.99, 0.995), (0.8, 0.85, 0.9, 0.95, 0.97)


def fit_all(args: argparse.Namespace) -> None:
    """Print how often the gate is right on the calibrated half, by limit. Passed ruined images weigh most."""
    found = [case for case in cases(args.out) if case.half == "calibrated" and case.label != "between"]
    for match_limit in MATCH_LIMITS:
        for clip_limit in CLIP_LIMITS:
            limits = Limits(clip=clip_limit, match=match_limit)
            gates = [(case.label, judged[0].gate) for case in found if (judged := case.judged(39, limits))]
            counts = {
                f"{label} {gate.value}": sum(one == (label, gate) for one in gates)
                for label in ("ruined", "good")
                for gate in Gate
            }
            print(f"match {match_limit:.2f}, clip {clip_limit:.3f}:", counts, flush=True)


def judge_all(args: argparse.Namespace) -> None:
    """Judge every variant with the gate, as the report does, and count how often it is right."""
    scorer = find_scorer(SCORER)
    limits = Limits().for_scorer(scorer.id)
    found = list(cases(args.out))
    rows = []
    for case in found:
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
        for number in NUMBERS:
            judged = case.judged(number, limits)
            if judged is None:
                continue
            judgement, close = judged
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
    for number in NUMBERS:
        for half in HALVES:
            print(number, half, result["tally"][str(number)][half])
    if args.record:
        lines = ",\n".join("  " + json.dumps(row) for row in result.pop("rows"))
        head = json.dumps(result, indent=1)[:-2]
        args.record.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n')


def ends(kept: Kept | None) -> list[float | None] | None:
    """Return the gate's lower bound, its mean and its upper bound."""
    if kept is None:
        return None
    bounds = kept.bounds
    return [None if x is None else round(x, 4) for x in (bounds.low, bounds.point, bounds.high)]


def tally(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts by number of images, half and label."""
    return {
        str(number): {
            half: {
                label: {
                    gate: sum(
                        row.get(str(number)) == gate and row["half"] == half and row["label"] == label
                        for row in rows
                    )
                    for gate in GATES
                }
                for label in LABELS
            }
            for half in HALVES
        }
        for number in NUMBERS
    }


def summary_table(result: dict[str, Any]) -> str:
    """Return a table of the gate's verdicts by half, number of images and label."""
    lines = ["| half | images | truth | variants | failed | unclear | passed |", "|" + " --- |" * 7]
    told = {
        "ruined": "ruined: falls by 10 points or more",
        "between": "between: falls by 2 to 10 points",
        "good": "good: falls by under 2 points",
    }
    for half in ("held out", "later", "calibrated"):
        for number in NUMBERS:
            for label in LABELS:
                counts = result["tally"][str(number)][half][label]
                cells = [half, str(number), told[label], str(sum(counts.values()))]
                cells += [str(counts[gate]) for gate in ("failed", "unclear", "passed")]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"{headline(result)} (scorer `{result['scorer']}`)."])


def headline(result: dict[str, Any]) -> str:
    """Say how often the gate is right on the held-out half, from the prompt set's 39 images."""
    counts = result["tally"][str(SET_PICTURES)]["held out"]
    ruined, good = counts["ruined"], counts["good"]
    fails, passes = ruined["failed"] / sum(ruined.values()), good["passed"] / sum(good.values())
    return (
        f"Held out, {SET_PICTURES} images: of {sum(ruined.values())} ruined {100 * fails:.1f} % fail and "
        f"{ruined['passed']} pass; of {sum(good.values())} good {100 * passes:.1f} % pass and {good['failed']} fail"
    )


def readme_claim(result: dict[str, Any]) -> str:
    """Return the README's sentence on how often the gate is right."""
    counts = result["tally"][str(SET_PICTURES)]["held out"]
    ruined, good = counts["ruined"], counts["good"]
    fails = 100 * ruined["failed"] / sum(ruined.values())
    passes = 100 * good["passed"] / sum(good.values())
    none = "passes none" if ruined["passed"] == 0 else f"passes {ruined['passed']}"
    return (
        f"On kinds of damage that no limit was chosen on it fails {fails:.0f} % of the ruined and {none}, and passes "
        f"{passes:.0f} % of the good, from {SET_PICTURES} images"
    )


def rows_table(result: dict[str, Any]) -> str:
    headings = ["model", "variant", "held to", "half", "fall, points", "13", "39", "100", "why, of 39"]
    lines = ["| " + " | ".join(headings) + " |", "|" + " --- |" * len(headings)]
    for row in sorted(result["rows"], key=lambda row: row["fall"]):
        verdicts = [row.get(str(number), "–") for number in NUMBERS]
        cells = [row["model"], f"`{row['variant']}`", row["held_to"], row["half"], f"{100 * row['fall']:.1f}"]
        lines.append("| " + " | ".join([*cells, *verdicts, row["why"]]) + " |")
    return "\n".join(lines)


def filled(page: str, result: dict[str, Any]) -> str:
    """Fill the page's two tables from the record."""
    for name, make in (("gate summary", summary_table), ("gate rows", rows_table)):
        before, rest = page.split(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{make(result)}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


def write_tables(args: argparse.Namespace) -> None:
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RECORD.read_text())))


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
