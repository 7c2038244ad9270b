"""Measure the quality gate: its verdicts on good and bad recipes from 39 images, compared with the truth.

    python -m tinyworld.calibrate_gate draw --model tiny-sd --out build/gate       images and the verifier's truth
    python -m tinyworld.calibrate_gate judge --out build/gate --scorer tiny-clip --record results/quality-gate.json
    python -m tinyworld.calibrate_gate table                                       writes it into docs/quality.md

The truth is the exact verifier's accuracy (everything right) over held-out captions. The gate sees neither: it sees the
13 prompts of the prompt set "tinyworld" at 3 seeds, as in `vivace bench --prompt-set tinyworld`. A recipe whose
accuracy falls by 10 points or more is bad, one that falls by less than 2 is good; those in between count as neither.
Recipes with existing images are skipped, so an interrupted run resumes.

Images are generated in batches, each from its own seed. A step cache then decides for a whole batch.
"""

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import vivace
from tinyworld import evaluate
from vivace.benchmark.comparison import comparisons
from vivace.benchmark.figures import compute_figures, keys_of
from vivace.benchmark.requests import Scorer
from vivace.benchmark.store import save_picture
from vivace.errors import VivaceError
from vivace.measure.environment import environment
from vivace.measure.quality import faults, pixels
from vivace.models.scorers import find_scorer
from vivace.report.rows import rows_of
from vivace.runtime.session import Session
from vivace.spec.environment import Environment
from vivace.spec.figures import QualityPass
from vivace.spec.limits import Limits
from vivace.spec.record import Outcome, Picture, Record, Round
from vivace.spec.study import Study
from vivace.spec.trial import Trial

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results/quality-gate.json", ROOT / "docs/quality.md"
PROMPT_SET = "tinyworld"
RUINED, GOOD = 0.10, 0.02  # falls of accuracy
BATCH, CACHE_BATCH = 125, 13

_COMMON = (
    "baseline", "bf16", "fp32", "channels_last", "attention(math)", "int8", "int4", "tiny_vae",
    "bf16+int8+tiny_vae", "int4+tiny_vae",
)  # fmt: skip
_SD = (
    *(f"steps({n})" for n in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20)),
    *(f"guidance({g})" for g in (0, 1.5, 2.5, 3, 5, 6, 8, 10, 14, 20)),
    *(f"cfg_cutoff({c})" for c in (0.1, 0.2, 0.4, 0.6, 0.8)),
    *(f"scheduler({s})" for s in ("dpmpp_2m", "euler", "unipc")),
    *(f"scheduler(dpmpp_2m)+steps({n})" for n in (1, 2, 4, 6, 8, 12, 20)),
    *(f"scheduler(euler)+steps({n})" for n in (2, 4, 8)),
    "tiny_vae+steps(20)+cfg_cutoff(0.4)", "tiny_vae+steps(3)", "int4+steps(4)", "cfg_cutoff(0.2)+steps(6)",
)  # fmt: skip
_FLUX = (
    *(f"steps({n})" for n in (1, 2, 3, 4, 5, 6, 8, 10, 14, 21)),
    *(f"guidance({g})" for g in (0, 0.5, 1, 1.5, 2, 2.5, 5, 6)),
    *(f"first_block_cache({t})" for t in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.5, 3.0)),
    *(f"first_block_cache(hits={h})" for h in (0.3, 0.5, 0.65, 0.8, 0.9)),
    "first_block_cache(0.1)+int8+tiny_vae", "first_block_cache(0.3)+tiny_vae", "tiny_vae+steps(14)",
    "tiny_vae+steps(3)", "int4+steps(4)", "int4+guidance(0)",
)  # fmt: skip
_SCHNELL = ("steps(1)", "steps(2)", "steps(3)", "steps(8)", "tiny_vae+steps(2)", "int8+steps(3)")
RECIPES = {
    "tiny-sd": (*_COMMON, *_SD),
    "tiny-flux": (*_COMMON, *_FLUX),
    "tiny-flux-schnell": (*_COMMON, *_SCHNELL),
}


def draw_recipe(
    trial: Trial, device: str, captions: Sequence[str], scorer: evaluate.Scorer, pictures: Path
) -> dict[str, Any]:
    """Generate and save a recipe's 39 images; return them with the verifier's accuracies over the captions."""
    session = vivace.load(trial.model.name, trial.recipe.text, device=device)
    is_cached = "cache" in trial.recipe.text
    batch = CACHE_BATCH if is_cached else BATCH
    tasks = list(trial.workload.pictures())
    seen = draw(session, [t[1] for t in tasks], [t[2] for t in tasks], batch)
    kept = []
    for (index, prompt, seed), picture in zip(tasks, seen, strict=True):
        png = io.BytesIO()
        Image.fromarray(picture).save(png, format="PNG")
        sha256 = save_picture(pictures, png.getvalue())
        found = tuple(faults(pixels(picture)))
        kept.append(Picture(index=index, prompt=prompt, seed=seed, sha256=sha256, faults=found))
    seeds = [evaluate.PICTURE_SEED + k for k in range(len(captions))]
    accuracies = scorer(draw(session, captions, seeds, batch), captions)
    evidence = session.evidence()
    reason = session.refuted(dict(evidence) | {"attention_kernels": []}) if is_cached else None
    return {
        "pictures": [picture.model_dump(mode="json") for picture in kept],
        "accuracies": accuracies,
        "evidence": evidence,
        "reason": reason,
    }


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
    scorer = evaluate.Scorer(args.workers)
    captions = evaluate.held_out_captions(args.captions)
    recipes = RECIPES[args.model][:: args.every] if args.every > 1 else RECIPES[args.model]
    wanted = args.recipes or recipes
    (prepared,) = comparisons(
        Study.of(args.model, ["baseline", *wanted], prompt_set=PROMPT_SET, rivals=False)
    )
    folder = args.out / args.model
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in prepared.recipes:
        trial = Trial(
            model=prepared.found.model, recipe=recipe.spec, workload=prepared.workload, device=args.device
        )
        path = folder / f"{recipe.spec.digest()[:16]}.json"
        if path.exists():
            continue
        try:
            row = draw_recipe(trial, args.device, captions, scorer, args.out / "pictures")
        except VivaceError as error:
            row = {"reason": str(error)}
        row |= {
            "trial": trial.model_dump(mode="json"),
            "environment": environment(args.device).model_dump(mode="json"),
            "captions": len(captions),
        }
        path.write_text(json.dumps(row) + "\n")
        right = row["accuracies"]["everything"]["accuracy"] if "accuracies" in row else None
        print(args.model, recipe.text, row["reason"] if right is None else f"{right:.3f}", flush=True)


def judge_all(args: argparse.Namespace) -> None:
    """Judge every recipe with the gate, as the report does, and count how often it is right."""
    scorer = find_scorer(args.scorer)
    limits = (Limits() if args.limits is None else Limits(**json.loads(args.limits))).for_scorer(scorer.id)
    rows: list[dict[str, Any]] = []
    for folder in sorted(p for p in args.out.iterdir() if p.is_dir() and p.name in RECIPES):
        rows += judge_model(folder, args.out / "pictures", scorer.id, scorer.folder, limits)
    result = {"limits": limits.model_dump(mode="json"), "scorer": scorer.id, **tally(rows), "rows": rows}
    for row in sorted(rows, key=lambda row: row["fall"]):
        print(f"{row['model']:18} {row['recipe']:48} {100 * row['fall']:6.1f}  {row['gate']:8} {row['why']}")
    print({key: value for key, value in result.items() if key != "rows"})
    if args.record:
        args.record.write_text(json.dumps(result, indent=1) + "\n")


def judge_model(
    folder: Path, pictures: Path, scorer_id: str, scorer: Path, limits: Limits
) -> list[dict[str, Any]]:
    drawn = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    listed = {
        prepared.text
        for prepared in comparisons(Study.of(folder.name, ["baseline", *RECIPES[folder.name]]))[0].recipes
    }
    drawn = [row for row in drawn if row["reason"] is None and row["trial"]["recipe"]["text"] in listed]
    drawn.sort(key=lambda row: row["trial"]["recipe"]["text"] != "baseline")
    records = [_record(row) for row in drawn]
    keys = keys_of(records, None, scorer_id)
    request = Scorer(folder=str(scorer), others=PROMPT_SET)
    figures = {row.key: row for row in compute_figures(pictures, keys, request, "cpu")}
    best = drawn[0]["accuracies"]["everything"]["accuracy"]
    found = []
    for stored, row in zip(
        drawn[1:], rows_of(records, QualityPass(figures, scorer_id), limits)[1:], strict=True
    ):
        assert row.judgement is not None
        assert row.fidelity is not None
        accuracy = stored["accuracies"]["everything"]["accuracy"]
        found.append(
            {
                "model": row.model,
                "recipe": row.recipe,
                "same_picture": row.record.trial.recipe.same_picture,
                "accuracy": accuracy,
                "fall": round(best - accuracy, 4),
                "gate": row.judgement.gate.value,
                "why": row.judgement.reason,
                "fidelity": row.fidelity.to_json(),
                "evidence": stored["evidence"],
                "captions": stored["captions"],
                "device": stored["environment"]["device_name"],
            }
        )
    return found


def tally(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the bad recipes that the gate failed, and the good ones that it passed."""
    ruined = [row for row in rows if row["fall"] >= RUINED]
    good = [row for row in rows if row["fall"] < GOOD]
    return {
        "num_recipes": len(rows),
        "num_ruined": len(ruined),
        "num_caught": sum(row["gate"] == "failed" for row in ruined),
        "num_good": len(good),
        "num_passed": sum(row["gate"] == "passed" for row in good),
    }


def summary_table(result: dict[str, Any]) -> str:
    """Return a table of the gate's verdicts by kind of recipe."""
    lines = ["| recipes | number | failed | unclear | passed |", "| --- | --- | --- | --- | --- |"]
    kinds = (
        ("ruined: fell by 10 points or more", RUINED, float("inf")),
        ("between: fell by 2 to 10 points", GOOD, RUINED),
        ("good: fell by under 2 points", float("-inf"), GOOD),
    )
    for name, low, high in kinds:
        verdicts = [row["gate"] for row in result["rows"] if low <= row["fall"] < high]
        counts = [verdicts.count(verdict) for verdict in ("failed", "unclear", "passed")]
        lines.append(f"| {name} | {len(verdicts)} | " + " | ".join(map(str, counts)) + " |")
    caught = result["num_caught"] / result["num_ruined"]
    passed = result["num_passed"] / result["num_good"]
    said = f"Of the ruined, {100 * caught:.1f} % fail, and of the good, {100 * passed:.1f} % pass"
    return "\n".join([*lines, "", f"{said} (scorer `{result['scorer']}`)."])


def rows_table(result: dict[str, Any]) -> str:
    lines = ["| model | recipe | fall, points | gate | why |", "| --- | --- | --- | --- | --- |"]
    for row in sorted(result["rows"], key=lambda row: row["fall"]):
        cells = [row["model"], f"`{row['recipe']}`", f"{100 * row['fall']:.1f}", row["gate"], row["why"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def filled(page: str, result: dict[str, Any]) -> str:
    """Fill the page's two tables from the record."""
    for name, make in (("gate summary", summary_table), ("gate rows", rows_table)):
        before, rest = page.split(f"<!-- {name} -->\n")
        page = f"{before}<!-- {name} -->\n{make(result)}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


def write_tables(args: argparse.Namespace) -> None:
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RECORD.read_text())))


def _record(row: dict[str, Any]) -> Record:
    drawn = Round(
        index=0,
        outcome=Outcome.MEASURED,
        started_at="",
        pictures=tuple(Picture.model_validate(picture) for picture in row["pictures"]),
    )
    return Record(
        trial=Trial.model_validate(row["trial"]),
        environment=Environment.model_validate(row["environment"]),
        rounds=(drawn,),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("draw")
    part.add_argument("--model", choices=RECIPES, required=True)
    part.add_argument("--recipes", nargs="*", help="instead of the model's own list")
    part.add_argument("--every", type=int, default=1, help="only every n-th of the list")
    part.add_argument("--captions", type=int, default=500)
    part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    part.add_argument("--workers", type=int, default=1)
    part.set_defaults(run=draw_all)
    part = parts.add_parser("judge")
    part.add_argument("--scorer", default="tiny-clip")
    part.add_argument("--limits", help='JSON, e.g. {"clip": 0.9}; default: the product\'s')
    part.add_argument("--record", type=Path)
    part.set_defaults(run=judge_all)
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, required=True)
    parts.add_parser("table").set_defaults(run=write_tables)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
