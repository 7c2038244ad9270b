"""The page docs/choosing.md: which technique to use, in a sentence for each kind of model and card.

python -m docgen.choosing        make its images again; thresholds as `python -m benchmarks.step_curves` calibrated them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import vivace
from benchmarks import several_gpus, technique_cases
from benchmarks.step_curves import STEPS
from docgen import fastest
from docgen.fastest import Measurement
from docgen.readme import GPUS
from docgen.several_gpus import soonest
from docgen.step_curves import Against, Family, Point, families
from vivace.answers.formatting import seconds, size
from vivace.foundation.stats import Gate

IMAGES = Path(__file__).parents[1] / "docs" / "images"
LEVELS = (1.25, 1.5, 2.0, 2.5, 3.0)
PROMPTS = (
    "a red circle above a blue square",
    "a small yellow star left of a large purple diamond",
    "an orange cross in the top left on a checkered black background",
)
FULL_SIZE = {
    "tiny-sd": {"sd15": "SD 1.5", "sdxl": "SDXL"},
    "tiny-flux": {
        "flux-dev": "FLUX.1 [dev]",
        "flux2-klein-4b": "FLUX.2 [klein] 4B",
        "z-image-turbo": "Z-Image-Turbo",
        "qwen-image-2512": "Qwen-Image-2512",
    },
}
"""Full-size models, by the embedded one of the same kind."""
HEADINGS = {"tiny-sd": "UNets with guidance", "tiny-flux": "Transformers"}


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
    lines = [
        note,
        "# Which technique to use\n",
        "`--recipe best`: it takes what is named here, or what your own records know to be better. Below is what that "
        "is today. Times are seconds an image at a model's own size and steps; *predicted* ones come from another "
        "card's record and may be wrong by a factor of 1.6. The figures: [every model](models-measured.md), [every "
        "technique](techniques-measured.md), [skipped work](skipped-work.md). For your model and card: [`vivace "
        "recommend`](recommend.md).\n",
    ]
    for family in families(results):
        lines += [f"## {HEADINGS[family.name]}\n"]
        for model, title in FULL_SIZE[family.name].items():
            lines += [f"### {title}\n", *_of_model(model, measurements), ""]
        lines += [f"### Where the image may change, judged on {family.name}\n", *_skipping(family)]
    lines += [
        "## Few-step models: FLUX.1 [schnell], Turbo, Lightning, Hyper, LCM\n",
        "What makes a step cheaper works as on the model that they were distilled from; there is nothing to skip. "
        "Decoding is a larger part of a short call, so consider `tiny_vae`.\n",
        "## Several GPUs\n",
        "For one image sooner: `parallel(ulysses)` or, on FLUX, `parallel(all_gather)` (measured under its old "
        "spelling, `parallel(ring)`) for a transformer, `parallel(cfg)` for a UNet with guidance ([what it "
        "gains](several-gpus.md)). For more images an hour: one process per GPU, without any of these.\n",
        *soonest(results / several_gpus.RECORD.name),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _of_model(model: str, measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield a sentence for each card of the records, and for a usual one of each size."""
    known = fastest.fastest_known(measurements, (model,))
    for row in known:
        best, gain = row.best, "" if row.best.gain is None else f", {row.best.gain.point:.2f} times as fast"
        peak = "" if best.peak_bytes is None else f", in {size(best.peak_bytes)}"
        yield (
            f"- **{best.card.removeprefix('NVIDIA ')}**: `{best.recipe}`, [{seconds(best.latency.point)}]"
            f"(../{best.record}){gain}{peak}."
        )
    for gpu in GPUS:
        if any(gpu in row.best.card for row in known):
            continue
        chosen = vivace.recommend(model, gpu=gpu, same_picture=True).chosen
        if chosen is None or chosen.latency is None:
            yield (
                f"- **{gpu}**: nothing is known that fits."
                if chosen is None
                else f"- **{gpu}**: `{chosen.recipe}`."
            )
            continue
        how = " predicted" if chosen.predicted_from else ""
        peak = "" if chosen.peak_bytes is None else f", in {size(chosen.peak_bytes)}"
        yield f"- **{gpu}**: `{chosen.recipe}`, {seconds(chosen.latency.point)}{how}{peak}."


def _skipping(family: Family) -> Iterator[str]:
    """Yield a sentence for each level of speed-up, and what is behind fewer steps."""
    for pick in picks(family):
        rival = ""
        if pick.rival is not None:
            mark = "" if _passed(pick.rival) else ", which fails the gate,"
            rival = f"; `{pick.rival.row.recipe}`{mark} has {pick.rival.mean_ssim:.3f}"
        yield (
            f"- **{pick.level:g} times as fast**: `{pick.point.row.recipe}`, [SSIM {pick.point.mean_ssim:.3f}]"
            f"(step-curves.md) of the denoiser's {pick.point.speedup:.2f}x{rival}."
        )
    behind = [name for name, points in family.curves if _is_behind(points)]
    if behind:
        listed = ", ".join(f"`{name}`" for name in behind)
        yield f"\nNot worth using, since fewer plain steps do as well or better: {listed}."
    yield (
        f"\n![{family.name}: images of the baseline, each recipe, and the fewer steps of the last one]"
        f"({_image(family)})\n"
    )


def _is_behind(points: Sequence[Point]) -> bool:
    against = {point.against for point in points if point.curve != STEPS}
    return Against.BELOW in against and Against.ABOVE not in against


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
