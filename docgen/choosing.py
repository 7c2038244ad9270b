"""The page docs/choosing.md: which technique to use on which model, from the records of the other pages.

python -m docgen.choosing        make its images again; thresholds as `python -m benchmarks.step_curves` calibrated them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import several_gpus, skipped_work, technique_cases
from benchmarks.skipped_work import read_operations
from benchmarks.step_curves import STEPS
from benchmarks.technique_cases import full_length
from benchmarks.technique_records import by_gpu, key_of, read_records, rows_with_baselines
from docgen import fastest
from docgen.fastest import Measurement
from docgen.several_gpus import soonest
from docgen.skipped_work import skipping_of
from docgen.step_curves import Against, Family, Point, families
from docgen.technique_lines import Line, lines_of, waits_for_changed_cpu
from vivace.answers.formatting import ratio, size
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import Gate, Verdict
from vivace.report.rows import Row

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LEVELS = (1.25, 1.5, 2.0, 2.5, 3.0)
PROMPTS = (
    "a red circle above a blue square",
    "a small yellow star left of a large purple diamond",
    "an orange cross in the top left on a checkered black background",
)
FULL_SIZE = {"tiny-sd": ("sd15", "sdxl"), "tiny-flux": ("flux-dev", "flux2-klein-4b", "z-image-turbo")}
"""Full-size models for the embedded one of the same kind."""
HEADINGS = {
    "tiny-sd": "UNets with guidance: SD 1.5, SDXL, Pony, Playground",
    "tiny-flux": "Transformers: FLUX.1 [dev]",
}
_MOST = 5


@dataclass(frozen=True)
class Pick:
    """The recipe closest to the baseline among those with a given speed-up.

    level: the minimum speed-up.
    rival: fewer plain steps with at least that speed-up, None where none were measured.
    """

    level: float
    point: Point
    rival: Point | None


def picks(family: Family) -> list[Pick]:
    """Return the pick for each of LEVELS among recipes that passed the gate; a recipe only for its highest level."""
    best_by_recipe: dict[str, Pick] = {}
    plain = [point for point in family.points if point.curve == STEPS]
    passed = [point for point in family.points if point.curve != STEPS and _passed(point)]
    for level in LEVELS:
        fast = [point for point in passed if point.speedup >= level]
        if not fast:
            break
        best = max(fast, key=lambda point: point.mean_ssim)
        rivals = [point for point in plain if point.speedup >= level]
        rival = max(rivals, key=lambda point: point.mean_ssim) if rivals else None
        best_by_recipe[best.row.recipe] = Pick(level, best, rival)
    return list(best_by_recipe.values())


def _passed(point: Point) -> bool:
    return point.row.judgement is not None and point.row.judgement.gate is Gate.PASSED


def page(note: str, results: Path, measurements: Sequence[Measurement] = ()) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
        measurements: what all records say of full-size models.
    """
    has_skipped = any((results / skipped_work.record_file(n).name).exists() for n in skipped_work.FAMILIES)
    gain, soonest_rows = "no record of their speed is kept yet", []
    if (several := results / several_gpus.RECORD.name).exists():
        gain, soonest_rows = "[what it gains](several-gpus.md)", soonest(several)
    lines = [
        note,
        "# Which technique to use\n",
        "From the records of [every "
        f"technique](techniques-measured.md){', [what skipping saves](skipped-work.md)' if has_skipped else ''} and "
        "[speed-up against fidelity](step-curves.md). Times are measured on an H200, unless another GPU is named, "
        "with random weights, image "
        "quality on the embedded models of the same kinds. [`vivace recommend`](recommend.md) reads these records, and "
        "yours, for one model and card; compare the candidates with `vivace bench`, and let `vivace "
        "calibrate cache` find the threshold of a step cache.\n",
    ]
    chosen = families(results)
    models = tuple(name for pick in chosen for name in FULL_SIZE[pick.name])
    if fastest_rows := fastest.fastest_known(measurements, models):
        lines += [
            "## The fastest known\n",
            "Of each card, the fastest recipe on record that leaves out no step's work, as on [every "
            "model](models-measured.md), which has all models ([how FLUX gets there](performance/flux.md), "
            "[UNets](performance/unets.md)). *50, from 8*: 8 steps were timed, and the time is scaled to 50.\n",
            *fastest.table(fastest_rows),
            "",
            fastest.MARKS,
            "",
        ]
    for family in chosen:
        lines += _family(family, results)
    lines += [
        "## Few-step models: FLUX.1 [schnell], Turbo, Lightning, Hyper, LCM\n",
        "In four steps there is little to skip: a fixed schedule of 30 % skips none of them, one of 50 % skips one. "
        "What makes each step cheaper works as on the model they were distilled from. Decoding is a larger part of "
        "a short call, so consider `tiny_vae`.\n",
        "## Several GPUs\n",
        "For one image sooner: `parallel(ulysses)` or, on FLUX, `parallel(all_gather)` (measured under its old "
        f"spelling, `parallel(ring)`) for a transformer, `parallel(cfg)` for a UNet with guidance ({gain}). For more "
        "images an hour: one process per GPU, without any of these.\n",
        *soonest_rows,
    ]
    return "\n".join(lines).rstrip() + "\n"


def _family(family: Family, results: Path) -> list[str]:
    lines = [f"## {HEADINGS[family.name]}\n"]
    for name in FULL_SIZE[family.name]:
        lines += _same_picture(name, results)
    lines += _skipping(family, results)
    return lines


def _same_picture(name: str, results: Path) -> list[str]:
    """List what is faster, and what needs less memory, on a full-size model; of each GPU by itself."""
    gpus = by_gpu(read_records(results / technique_cases.record_file(name).name))
    lines = []
    for gpu, records in gpus.items():
        heading = f"{name} on {gpu}" if len(gpus) > 1 else name
        lines += _same_picture_on(heading, name, records)
    return lines


def _same_picture_on(heading: str, name: str, records: Sequence[Record]) -> list[str]:
    measured = lines_of(name, records)
    kept = [line for line in measured if line.row.record.trial.recipe.same_picture]
    baselines = [line for line in kept if line.speedup is None]
    if not baselines:
        return []
    faster = [line for line in kept if line.verdict is Verdict.FASTER]
    faster.sort(key=lambda line: -(line.speedup.point if line.speedup else 0))
    listed = ", ".join(_with_gain(line) for line in faster[:_MOST]) or "none of those measured"
    own = technique_cases.baseline(name)
    against = "" if own == BASELINE else f" (against `{own}`)"
    lines = [f"- **{heading}, faster with the same image{against}:** {listed}."]
    memory = baselines[-1].row.memory
    smaller = [
        line
        for line in kept
        if line.row.memory is not None and line.speedup is not None and not waits_for_changed_cpu(line.row)
    ]
    smaller.sort(key=lambda line: line.row.memory.peak_bytes if line.row.memory else 0)
    if memory is not None:
        listed = ", ".join(_with_peak(line) for line in _worthwhile(smaller, memory.peak_bytes))
        lines.append(
            f"- **{heading}, less memory** (baseline peak {size(memory.peak_bytes)}): "
            f"{listed or 'none of those measured'}."
        )
    return lines


def _worthwhile(smaller: Sequence[Line], peak: int) -> list[Line]:
    """Return, by rising memory, each line that is faster than all smaller ones."""
    kept: list[Line] = []
    for line in smaller:
        gain = line.speedup.point if line.speedup else 0
        memory = line.row.memory.peak_bytes if line.row.memory else 0
        if memory < 0.95 * peak and all(
            gain > (other.speedup.point if other.speedup else 0) for other in kept
        ):
            kept.append(line)
    return kept[:_MOST]


def _with_gain(line: Line) -> str:
    assert line.speedup is not None
    return f"`{line.row.recipe}` {ratio(line.speedup)}"


def _with_peak(line: Line) -> str:
    assert line.row.memory is not None
    assert line.speedup is not None
    return f"`{line.row.recipe}` {size(line.row.memory.peak_bytes)} at {line.speedup.point:.2f}x"


def _skipping(family: Family, results: Path) -> list[str]:
    chosen = picks(family)
    if not chosen:
        return []
    lines = [
        "",
        f"**Skipping work**, judged on {family.name}: for each level of speed-up, the recipe closest to the baseline "
        "among those that pass the quality gate, compared with fewer plain steps of the same speed-up.\n",
        "| at least | recipe | speed-up of the denoiser | SSIM, PSNR dB | fewer steps | their SSIM |",
        "|" + " --- |" * 6,
    ]
    for pick in chosen:
        fidelity = pick.point.row.fidelity
        psnr = (
            f", {fidelity.psnr_db.point:.1f}" if fidelity is not None and fidelity.psnr_db is not None else ""
        )
        rival = ["-", "-"]
        if pick.rival is not None:
            mark = "" if _passed(pick.rival) else " (gate not passed)"
            rival = [f"`{pick.rival.row.recipe}`{mark}", f"{pick.rival.mean_ssim:.3f}"]
        cells = [f"{pick.level:g}x", f"`{pick.point.row.recipe}`", f"{pick.point.speedup:.2f}x"]
        lines.append(f"| {' | '.join([*cells, f'{pick.point.mean_ssim:.3f}{psnr}', *rival])} |")
    lines += [
        "",
        f"![{family.name}: images of the baseline, each recipe, and the fewer steps of the last row]({_image(family)})",
        "",
    ]
    behind = [name for name, points in family.curves if _is_behind(points)]
    if behind:
        listed = ", ".join(f"`{name}`" for name in behind)
        lines.append(f"Not worth using, since fewer plain steps do as well or better: {listed}.\n")
    for name in FULL_SIZE[family.name]:
        lines += _on_full_size(name, results)
    return lines


def _is_behind(points: Sequence[Point]) -> bool:
    against = {point.against for point in points if point.curve != STEPS}
    return Against.BELOW in against and Against.ABOVE not in against


def _on_full_size(name: str, results: Path) -> list[str]:
    """Compare measured with ideal speed-ups at about half of the steps."""
    own = technique_cases.baseline(name)
    rows = rows_with_baselines(read_records(results / skipped_work.record_file(name).name), own)
    operations = read_operations().get(name, {})
    whole: Row | None = None
    gains = []
    for row in rows:
        if row.is_baseline:
            whole = row
        elif whole is not None and row.latency is not None and row.speedup is not None:
            if not ("hits=0.5" in row.recipe or "cfg_cutoff(0.5)" in row.recipe):
                continue
            skipped = skipping_of(row, whole, operations)
            if skipped is not None:
                gains.append(f"`{row.recipe}` {row.speedup.point:.2f}x of {skipped.ideal:.2f}x")
    steps = key_of(rows[0].record)[1] if rows else full_length(name)
    against = f"{steps} steps" if own == BASELINE else f"{steps} steps, against `{own}`"
    return (
        [f"On {name} ({against}), half of the steps skipped, measured of ideal: {', '.join(gains)}.\n"]
        if gains
        else []
    )


def _image(family: Family) -> str:
    return f"images/choosing-{family.name}.png"


def draw(family: Family) -> None:
    """Make the page's images of a model: a row per prompt; the baseline, each pick, and the last one's rival."""
    from PIL import Image, ImageDraw

    import vivace

    chosen = picks(family)
    recipes = ["baseline", *(pick.point.row.recipe for pick in chosen)]
    if chosen and chosen[-1].rival is not None:
        recipes.append(chosen[-1].rival.row.recipe)
    side, title = 128, 14
    sheet = Image.new("RGB", (len(recipes) * (side + 4) - 4, title + len(PROMPTS) * (side + 4) - 4), "white")
    write = ImageDraw.Draw(sheet)
    for column, recipe in enumerate(recipes):
        left = column * (side + 4)
        write.text((left + 1, 1), recipe, fill="black")
        with vivace.load(family.name, recipe, device="cpu") as session:
            for row, prompt in enumerate(PROMPTS):
                import torch

                generator = torch.Generator().manual_seed(0)
                picture = session(prompt, generator=generator).images[0]
                sheet.paste(picture, (left, title + row * (side + 4)))
    sheet.save(IMAGES / Path(_image(family)).name, optimize=True)


def main() -> None:
    for family in families(technique_cases.RESULTS):
        draw(family)


if __name__ == "__main__":
    main()
