"""Step caches at equal numbers of computed steps, on the embedded models: which predictor, and which steps.

    python -m benchmarks.step_budgets --limit-s 400          what the record lacks, until the time limit
    python -m benchmarks.step_budgets tiny-flux --budget 7   one model, one budget

Each budget is drawn by fewer plain steps; by computed steps that are evenly spread, or searched as `vivace calibrate
schedule` does, with each predictor; and by caches with thresholds, which are bisected until they compute as many steps
on average. Images are compared with those of all steps: PSNR, SSIM and, where AlexNet's weights are on the machine,
LPIPS, one figure an image. Intervals are bootstraps over prompts of the difference to fewer plain steps. Schedules are
searched on other seeds than those that are compared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

import vivace
from benchmarks.command import MEASURED_IN_PART, run
from vivace.errors import Unsupported
from vivace.measure.image_metrics import paired_metrics
from vivace.measure.machine import choose_device
from vivace.measure.scorer import Lpips
from vivace.models.find import find_model
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.runtime.cache_fits import SearchProgress, calibrate_schedule, evenly_spread
from vivace.runtime.calls import generators_of, prompts_of

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = PROMPT_SETS["tinyworld"]
STEPS = {"tiny-sd": 20, "tiny-flux": 28}
BUDGETS = (5, 7, 10)
OUTPUTS = {
    "repeat": "taylorseer(order=0)",
    "taylor": "taylorseer(order=1)",
    "average_velocity": "taylorseer(predictor=average_velocity)",
    "dmd": "taylorseer(predictor=dmd)",
}
CACHES = {
    "tiny-sd": {**OUTPUTS, "deepcache": "deepcache"},
    "tiny-flux": {
        **OUTPUTS,
        "residual, repeat": "seacache",
        "residual, taylor": "seacache(order=1)",
        "residual, average_velocity": "seacache(predictor=average_velocity)",
        "residual, dmd": "seacache(predictor=dmd)",
    },
}
"""By model: what continues the denoiser's output, or the residual of its blocks, on a schedule."""
THRESHOLDS = {
    "tiny-sd": {},
    "tiny-flux": {
        "first_block_cache": (0.01, 3.0),
        "seacache": (0.02, 4.0),
        "seacache, order=1": (0.02, 4.0),
        "dual_block_cache, order=1": (0.01, 3.0),
    },
}
"""By model: caches with their knobs, and the thresholds between which to search."""
FIRST_SEED = 1000
"""Of the images that are compared; schedules are searched on seeds from 0."""
NUM_SEARCHED, NUM_BISECTED, NUM_RESAMPLED = 13, 4, 4000


@dataclass(frozen=True)
class Row:
    """One method at one budget.

    Attributes:
        computed: steps that were computed, the mean over the images.
        psnr, ssim, lpips: of each image to that of all steps, the prompts of one seed after the other.
        intervals: by figure, the mean difference to fewer plain steps, and the ends of its 95 % interval. None: this is
            they.
    """

    model: str
    num_steps: int
    budget: int
    method: str
    recipe: str
    computed: float
    psnr: list[float]
    ssim: list[float]
    lpips: list[float] | None
    intervals: dict[str, tuple[float, float, float]] | None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.budget, self.method


class OutOfTimeError(Exception):
    pass


class Drawing:
    """Draws the compared images of one model."""

    def __init__(self, model: str, device: str, num_prompts: int, num_seeds: int) -> None:
        self.model, self.device, self.num_steps = model, device, STEPS[model]
        self.prompts = PROMPTS[:num_prompts]
        self.num_seeds = num_seeds
        self.whole, _ = self.draw("baseline")

    def draw(self, recipe: str, num_prompts: int | None = None) -> tuple[list[Any], float]:
        """Return images (height, width, 3), 0 to 255, and the mean number of computed steps."""
        session = vivace.load(self.model, recipe, device=self.device)
        images: list[Any] = []
        steps: dict[str, Any] = {} if recipe.startswith("steps(") else {"num_inference_steps": self.num_steps}
        for seed in range(FIRST_SEED, FIRST_SEED + self.num_seeds):
            call = [(k, prompt, seed + 100 * k) for k, prompt in enumerate(self.prompts[:num_prompts])]
            for one in call:  # a threshold decides each image apart
                arguments = prompts_of([one]) | generators_of([one]) | steps
                drawn = session(**arguments, output_type="np").images
                images += [np.rint(image * 255).astype(np.uint8) for image in drawn]
        rate = session.evidence().get("cache_hit_rate", 0.0)
        session.close()
        return images, self.num_steps * (1 - float(str(rate)))


def difference(
    values: Sequence[float], plain: Sequence[float], num_prompts: int
) -> tuple[float, float, float]:
    """Return the mean difference of paired figures and its 95 % interval, a bootstrap over prompts."""
    of_prompts = (np.asarray(values) - np.asarray(plain)).reshape(-1, num_prompts).mean(axis=0)
    picked = np.random.default_rng(0).integers(0, num_prompts, (NUM_RESAMPLED, num_prompts))
    low, high = np.quantile(of_prompts[picked].mean(axis=1), [0.025, 0.975])
    return float(of_prompts.mean()), float(low), float(high)


def bisect_threshold(
    computed_at: Callable[[float], float], budget: int, low: float, high: float, runs: int = 8
) -> float:
    """Return the threshold whose mean number of computed steps is nearest to the budget."""
    tried: dict[float, float] = {}
    for _ in range(runs):
        middle = float(f"{(low * high) ** 0.5:.3g}")
        if middle not in tried:
            tried[middle] = computed_at(middle)
        if tried[middle] > budget:
            low = middle
        else:
            high = middle
    return min(tried, key=lambda threshold: abs(tried[threshold] - budget))


def methods(model: str) -> list[str]:
    spread = [f"{how} steps, {cache}" for how in ("even", "searched") for cache in CACHES[model]]
    return ["steps", *spread, *THRESHOLDS[model]]


def recipe_of(
    method: str, budget: int, drawing: Drawing, folder: Path, tries: int, check_time: Callable[[], None]
) -> str:
    """Return a method's recipe at a budget, searched or bisected where that is needed."""
    model, num_steps = drawing.model, drawing.num_steps
    if method == "steps":
        return f"steps({budget})"
    if method in THRESHOLDS[model]:
        name, _, knobs = method.partition(", ")

        def recipe_at(threshold: float) -> str:
            return f"{name}({threshold:g}{', ' + knobs if knobs else ''})"

        def computed_at(threshold: float) -> float:
            check_time()
            return drawing.draw(recipe_at(threshold), NUM_BISECTED)[1]

        return recipe_at(bisect_threshold(computed_at, budget, *THRESHOLDS[model][method]))
    how, _, named = method.partition(" steps, ")
    cache = CACHES[model][named]
    mask = evenly_spread(budget, num_steps)
    if how == "searched":

        def on_progress(_: SearchProgress) -> None:
            check_time()

        folder.mkdir(parents=True, exist_ok=True)
        mask = calibrate_schedule(
            find_model(model),
            drawing.device,
            PROMPTS,
            cache=cache,
            budget=budget,
            num_steps=num_steps,
            path=folder / f"{model}-{named.replace(', ', '-')}-{budget}of{num_steps}.json",
            num_images=NUM_SEARCHED,
            batch=NUM_SEARCHED,
            most=tries,
            on_progress=on_progress,
        ).mask
    start = cache.removesuffix(")") + (", " if cache.endswith(")") else "(")
    return resolve(f"{start}mask='{mask}')").text


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]


def write_rows(path: Path, rows: Sequence[Row], device: str) -> None:
    listed = ",\n".join(json.dumps(asdict(row)) for row in rows)
    about = json.dumps({"device": device, "first_seed": FIRST_SEED, "version": vivace.__version__})
    path.write_text(f'{{"about": {about}, "rows": [\n{listed}\n]}}\n', encoding="utf-8")


@click.command("step_budgets")
@click.argument("names", nargs=-1, metavar="[MODEL]...", type=click.Choice(tuple(STEPS)))
@click.option(
    "--budget", "budgets", multiple=True, type=click.IntRange(2, 19), default=BUDGETS, show_default=True
)
@click.option("--method", "only", multiple=True, help="This method; repeat for more. Default: all.")
@click.option(
    "--record", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS / "step-budgets.json"
)
@click.option(
    "--searches", type=click.Path(path_type=Path), default=Path(".vivace/step-budgets"), show_default=True
)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Stop after about this many seconds.")
@click.option("--prompts", "num_prompts", type=click.IntRange(1, len(PROMPTS)), default=len(PROMPTS))
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 100), default=2, show_default=True)
@click.option(
    "--tries", type=click.IntRange(1, 10_000), default=150, show_default=True, help="Schedules a search."
)
@click.option("--device", default="auto", show_default=True)
def step_budgets(
    names: tuple[str, ...],
    budgets: tuple[int, ...],
    only: tuple[str, ...],
    record: Path,
    searches: Path,
    limit_s: float | None,
    num_prompts: int,
    num_seeds: int,
    tries: int,
    device: str,
) -> int:
    """Compare step caches at equal computed steps; one line a method; resumable."""
    started = time.monotonic()

    def check_time() -> None:
        if limit_s is not None and time.monotonic() - started >= limit_s:
            raise OutOfTimeError

    device = choose_device(device)
    try:
        lpips: Lpips | None = Lpips(device)
    except Unsupported as reason:
        lpips = None
        click.echo(f"without LPIPS: {reason}", err=True)
    rows = {row.key: row for row in read_rows(record)}
    try:
        for model in names or STEPS:
            wanted = [
                (budget, method)
                for budget in budgets
                for method in methods(model)
                if (model, budget, method) not in rows and (not only or method in ("steps", *only))
            ]
            drawing = None
            for budget, method in wanted:
                check_time()
                begun = time.monotonic()
                drawing = drawing or Drawing(model, device, num_prompts, num_seeds)
                recipe = recipe_of(method, budget, drawing, searches, tries, check_time)
                images, computed = drawing.draw(recipe)
                plain = rows.get((model, budget, "steps"))
                row = row_of(drawing, budget, method, recipe, images, computed, plain, lpips)
                rows[row.key] = row
                write_rows(record, list(rows.values()), device)
                click.echo(f"{line(row)} ({time.monotonic() - begun:.0f} s)")
    except OutOfTimeError:
        click.echo(f"{limit_s:g} s are over; the same command goes on", err=True)
        return MEASURED_IN_PART
    return 0


def row_of(
    drawing: Drawing,
    budget: int,
    method: str,
    recipe: str,
    images: Sequence[Any],
    computed: float,
    plain: Row | None,
    lpips: Lpips | None,
) -> Row:
    paired = [paired_metrics(*pair) for pair in zip(images, drawing.whole, strict=True)]
    figures: dict[str, list[float] | None] = {
        "psnr": [min(100.0, each["psnr_db"]) for each in paired],  # equal images have an infinite one
        "ssim": [each["ssim"] for each in paired],
        "lpips": None if lpips is None else lpips.distances(images, drawing.whole),
    }
    intervals = None
    if plain is not None:
        compared = ((name, values, getattr(plain, name)) for name, values in figures.items())
        intervals = {
            name: difference(values, beside, len(drawing.prompts))
            for name, values, beside in compared
            if values is not None and beside is not None
        }
    computed = float(budget) if method == "steps" else computed
    return Row(
        drawing.model,
        drawing.num_steps,
        budget,
        method,
        recipe,
        computed,
        **figures,  # type: ignore[arg-type]
        intervals=intervals,
    )


def line(row: Row) -> str:
    """Return a row in words, with the figure that says most: LPIPS, or SSIM without it."""
    figure = "ssim" if row.lpips is None else "lpips"
    values = row.ssim if row.lpips is None else row.lpips
    text = (
        f"{row.model} {row.computed:.1f} of {row.num_steps}, {row.method}: PSNR {np.mean(row.psnr):.1f} dB, "
        f"{figure.upper()} {np.mean(values):.3f}"
    )
    if row.intervals is None:
        return text
    mean, low, high = row.intervals[figure]
    return f"{text}, {mean:+.3f} [{low:+.3f}, {high:+.3f}] beside fewer steps; {row.recipe}"


if __name__ == "__main__":
    raise SystemExit(run(step_budgets))
