"""vivace calibrate"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import Field

from vivace.cli.command import AsJson, command, interrupted
from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.limits import MinQuality
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    CallSettings,
    DeviceName,
    ModelName,
    NumSeeds,
    Option,
    Prompts,
    Settings,
    Store,
    Threads,
)
from vivace.foundation.spec.study import PromptSet, WorkloadRequest

if TYPE_CHECKING:
    from vivace.benchmark.cache_calibration import SettingTrial
    from vivace.foundation.spec.limits import SeenDamage, WitnessCalibration
    from vivace.measure.calibrating import CalibrationImages
    from vivace.measure.damage import DamageKind
    from vivace.models.scorers import LocatedJudge
    from vivace.runtime.cache_fits import SearchProgress
    from vivace.runtime.workloads import CheckedRequest


@click.group()
def calibrate() -> None:
    """Calibrate step caches, and the models that judge images, for a model."""


class CalibrationSettings(CallSettings):
    model: ModelName = "tiny-flux"
    num_images: Annotated[
        int,
        Field(ge=1, le=1000),
        Option("Images to generate and measure; image k has seed k.", "--images --pictures"),
    ] = 8
    device: DeviceName = "auto"
    threads: Threads = None
    as_json: AsJson = False


class TeacacheCommand(CalibrationSettings):
    degree: Annotated[int, Field(ge=1, le=8), Option("Degree of the polynomial.")] = 4


@calibrate.add_command
@command(TeacacheCommand)
def teacache(settings: TeacacheCommand) -> int:
    """Fit the polynomial that teacache uses, for a FLUX model.

    The polynomial rescales the input's change from step to step. It is fitted on images that the baseline generates
    from the model's own prompts. From then on teacache uses this fit for the model, even if there is a published one.

    \b
        vivace calibrate teacache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(settings)

    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_teacache

    def fit_it(is_read: Callable[[], None]) -> int:
        fit, file = calibrate_teacache(
            prepared.located,
            degree=settings.degree,
            on_image=_progress(settings.num_images, is_read),
            **arguments,
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(fit) | {"degree": fit.degree, "file": str(file)}, indent=2))
            return 0
        _echo(
            {
                "model": fit.model,
                "measured on": f"{fit.num_pairs} pairs of steps, {settings.num_images} images of {fit.num_steps} steps",
                "input changes": f"{fit.low:.4g} to {fit.high:.4g}",
                "degree": fit.degree,
                "coefficients": ", ".join(f"{c:.6g}" for c in fit.coefficients),
                "residual": f"{fit.residual:.4g} (root mean square error of the output's relative change)",
                "explained": f"{100 * fit.explained:.1f} % of its variance",
                "saved to": file,
            }
        )
        return 0

    return guarded(prepared.located, fit_it)


@calibrate.add_command
@command(CalibrationSettings)
def magcache(settings: CalibrationSettings) -> int:
    """Measure the magnitude ratios that magcache uses, for a FLUX model.

    A ratio says how the residual of the model's blocks grows from one step to the next. The ratios are measured on
    images that the baseline generates from the model's own prompts. From then on magcache uses them for the model, even
    if there are published ones.

    \b
        vivace calibrate magcache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(settings)

    from vivace.answers.formatting import count
    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_magcache

    def measure(is_read: Callable[[], None]) -> int:
        ratios, file = calibrate_magcache(
            prepared.located, on_image=_progress(settings.num_images, is_read), **arguments
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(ratios) | {"file": str(file)}, indent=2))
            return 0
        _echo(
            {
                "model": ratios.model,
                "measured on": f"{count(ratios.num_pictures, 'image')} of {len(ratios.ratios)} steps",
                "ratios": ", ".join(f"{ratio:.3f}" for ratio in ratios.ratios),
                "spread": f"{ratios.spread:.3g} (standard deviation between images, at the worst step)",
                "saved to": file,
            }
        )
        return 0

    return guarded(prepared.located, measure)


def _echo(facts: Mapping[str, object]) -> None:
    width = max(map(len, facts)) + 2
    click.echo("\n".join(f"{name:{width}}{value}" for name, value in facts.items()))


def _progress(num_images: int, is_read: Callable[[], None]) -> Callable[[int], None]:
    def on_image(num_done: int) -> None:
        if num_done == 0:
            is_read()
        else:
            click.echo(f"[{num_done}/{num_images}]", err=True)

    return on_image


def _prepare(settings: CalibrationSettings) -> tuple[CheckedRequest, dict[str, Any]]:
    """Return the checked request, and the arguments of its calibration."""
    from vivace.runtime.workloads import checked_request, default_threads

    prepared = checked_request(settings.model, "baseline", workload=settings.part(WorkloadRequest))

    import torch

    from vivace.measure.machine import choose_device

    torch.set_num_threads(settings.threads or default_threads(prepared.located))
    workload = prepared.workload
    return prepared, {
        "device": choose_device(settings.device),
        "prompts": workload.prompts,
        "num_images": settings.num_images,
        "call": workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
    }


class ScheduleCommand(CalibrationSettings):
    budget: Annotated[str, Option("Computed steps of all, such as 12/28.", metavar="N/STEPS")]
    num_images: Annotated[
        int,
        Field(ge=1, le=1000),
        Option("Images that each schedule is judged by; image k has seed k.", "--images --pictures"),
    ] = 20
    step_cache: Annotated[
        str, Option("The step cache that takes the schedule.", "--cache", metavar="RECIPE")
    ] = "taylorseer(order=0)"
    batch: Annotated[int, Field(ge=1, le=256), Option("Images drawn in one call.")] = 1
    tries: Annotated[int, Field(ge=1, le=100_000), Option("Schedules to try at most.")] = 200
    output: Annotated[
        Path | None, Option("File of the search; default: schedule-MODEL-NofSTEPS.json.", metavar="FILE")
    ] = None


@calibrate.add_command
@command(ScheduleCommand)
def schedule(settings: ScheduleCommand) -> int:
    """Search which steps a step cache computes, of a number that is given.

    Each schedule is judged by the final latents of a few images, beside those with every step computed. All that were
    tried are kept in one file: the same command continues where it stopped, and a recipe takes the file as its mask:
    seacache(mask=FILE).

    \b
        vivace calibrate schedule --model tiny-flux --budget 12/28
    """
    from vivace.answers.formatting import clock
    from vivace.errors import UsageError
    from vivace.runtime.cache_fits import calibrate_schedule, evenly_spread

    budget, _, steps = settings.budget.partition("/")
    if not (budget.isdecimal() and steps.isdecimal() and 2 <= int(steps) <= 1000):
        raise UsageError(f"--budget {settings.budget}: give computed steps of all steps, such as 12/28")
    settings = settings.model_copy(update={"num_inference_steps": int(steps)})
    prepared, arguments = _prepare(settings)
    name = prepared.located.model.name.replace("/", "-")
    path = settings.output or Path(f"schedule-{name}-{budget}of{steps}.json")

    from vivace.cli.watched.guarded import guarded

    def search_it(is_read: Callable[[], None]) -> int:
        begun = False

        def say(progress: SearchProgress) -> None:
            nonlocal begun
            left = f"at most about {clock(progress.seconds_left)} left"
            if not begun:
                begun = True
                is_read()
                images = f"{settings.num_images} images of {budget} computed steps each"
                click.echo(f"at most {progress.most} schedules, {images}; {left}", err=True)
            elif progress.num_tried % 10 == 0:
                click.echo(f"[{progress.num_tried}/{progress.most}] {left}", err=True)

        found = calibrate_schedule(
            prepared.located,
            cache=settings.step_cache,
            budget=int(budget),
            num_steps=int(steps),
            path=path,
            batch=settings.batch,
            most=settings.tries,
            on_progress=say,
            **arguments,
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(found) | {"file": str(path)}, indent=2))
            return 0
        even = found.distances[evenly_spread(int(budget), int(steps))]
        distance = found.distances[found.mask]
        _echo(
            {
                "mask": found.mask,
                "distance": f"{distance:.4g} (of the final latents; evenly spaced: {even:.4g})",
                "tried": f"{len(found.distances)} schedules, {settings.num_images} images each",
                "saved to": path,
            }
        )
        return 0

    return guarded(prepared.located, search_it)


class CacheCommand(Settings):
    model: ModelName = "tiny-sd"
    caches: Annotated[
        tuple[str, ...], Option("Step cache; repeat for more; default: all.", "--cache", metavar="NAME")
    ] = ()
    limits: MinQuality = None
    runs: Annotated[int, Field(ge=1, le=20), Option("Most settings to try for each cache.")] = 6
    prompt_set: Annotated[
        str | None, Option("Prompts: tinyworld, real or edit; default: the set that suits the model.")
    ] = None
    num_seeds: Annotated[NumSeeds, Option("Seeds per prompt; default: 3.", "--seeds")] = None
    device: DeviceName = "auto"
    threads: Threads = None
    store: Store = Path(DEFAULT_STORE)
    as_json: AsJson = False


@calibrate.add_command
@command(CacheCommand)
def cache(settings: CacheCommand) -> int:
    """Find the most aggressive step caches that pass the quality gate.

    Bisects each cache's threshold, or its share of cache hits if it has no threshold, with one benchmark for each
    setting. Records are kept in the store: the same command continues where it stopped.

    \b
        vivace calibrate cache --model tiny-flux --cache first_block_cache --min-quality clip=0.99
    """
    from vivace.answers.formatting import clock
    from vivace.benchmark.cache_calibration import CACHES, CacheSearch, calibrate_caches
    from vivace.cli.display.progress_display import for_this_terminal

    most = settings.runs * len(settings.caches or CACHES)
    click.echo(f"at most {most} settings, each measured beside the baseline", err=True)
    tried: list[SettingTrial] = []
    started = time.monotonic()

    def say(trial: SettingTrial) -> None:
        tried.append(trial)
        done = len(tried)
        left = (time.monotonic() - started) / done * (most - done)
        after = f"  (at most about {clock(left)} left)" if done < most else ""
        click.echo(
            f"setting {done} of at most {most}, {trial.recipe}: {trial.reason or trial.outcome}{after}",
            err=True,
        )

    try:
        calibrated = calibrate_caches(settings.part(CacheSearch), say, for_this_terminal())
    except KeyboardInterrupt:
        return interrupted(f"{len(tried)} settings and all finished rounds are kept")
    if settings.as_json:
        click.echo(json.dumps([asdict(calibrated) for calibrated in calibrated], indent=2))
        return 0
    for cached in calibrated:
        if cached.best is None:
            click.echo(f"{cached.cache}: none: {cached.reason}")
            continue
        click.echo(
            f"{cached.best.recipe}: {_format(cached.best.speedup, 'x')}, "
            f"{_format(cached.best.hit_rate)} of the steps reused"
        )
    return 0


def _format(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


class WitnessCommand(CallSettings):
    model: ModelName = "tiny-sd"
    names: Annotated[
        tuple[str, ...],
        Option(
            "What scores the images: clip:NAME, blip:NAME, pickscore, hpsv2:NAME, or a folder; repeat for more; "
            "default: the model's own scorer.",
            "--witness",
            metavar="KIND:NAME",
        ),
    ] = ()
    grade: Annotated[
        int,
        Field(ge=1, le=5),
        Option("Damage that must fail, from 1 (at the edge of what is visible) to 5 (plain to see)."),
    ] = 4
    only: Annotated[
        tuple[str, ...],
        Option("Kind of damage; repeat for more; default: all.", "--damage", metavar="NAME"),
    ] = ()
    prompts: Prompts = None
    prompt_set: PromptSet = None
    num_seeds: NumSeeds = None
    device: DeviceName = "auto"
    threads: Threads = None
    store: Store = Path(DEFAULT_STORE)
    as_json: AsJson = False


@calibrate.add_command
@command(WitnessCommand)
def witness(settings: WitnessCommand) -> int:
    """Find the limit of a model that judges images, on images of this model.

    Draws the prompt set once with the baseline, damages the images as acceleration does at graded strengths, and
    scores them by the witness. Its limit is chosen so that harmless changes pass and the damage that it detects
    fails. From then on bench, tune, prove and report use the limit for this model, unless --min-quality sets another.

    Everything is kept in the store: the same command goes on where it stopped, and another --witness draws nothing.

    \b
        vivace calibrate witness --model flux-dev --witness clip:openai/clip-vit-large-patch14
        vivace calibrate witness --model sdxl --witness pickscore --witness blip:models/blip-itm
    """
    kinds = _kinds(settings.only)
    prepared = _checked(settings.model, settings.part(WorkloadRequest))
    judges = _judges(prepared, settings.names)

    import torch

    from vivace.measure.calibrating import images_of
    from vivace.runtime.workloads import default_threads

    torch.set_num_threads(
        settings.threads if settings.threads is not None else default_threads(prepared.located)
    )
    images = images_of(prepared, settings.store)
    try:
        status = _draw(prepared, images, settings.device)
        calibrations = []
        for judge in judges if status == 0 else ():
            status = _calibrate(prepared, images, judge, kinds, settings.grade, settings.device)
            if status != 0:
                break
            calibrations.append(_kept(prepared, judge))
    except KeyboardInterrupt:
        status = INTERRUPTED
    if status == INTERRUPTED:
        return interrupted("the images and scores so far are kept")
    if status != 0:
        return status
    if settings.as_json:
        click.echo(
            json.dumps([calibration.model_dump(mode="json") for calibration in calibrations], indent=2)
        )
        return 0
    for number, calibration in enumerate(calibrations):
        click.echo("\n" if number else "", nl=False)
        _echo(_facts(calibration))
    return 0


def _kinds(names: Sequence[str]) -> list[DamageKind]:
    from vivace.errors import nearest
    from vivace.measure.damage import DAMAGE

    kinds = {kind.name: kind for kind in DAMAGE}
    for name in names:
        if name not in kinds:
            raise UsageError(
                f"--damage {name}: no such kind{nearest(name, list(kinds))}; there are {', '.join(kinds)}"
            )
    return [kind for kind in DAMAGE if not names or kind.name in names]


def _checked(model: str, request: WorkloadRequest) -> CheckedRequest:
    """Return the request for the baseline's images; by default of the model's own prompt set at three seeds."""
    from vivace.models.find import find_model
    from vivace.models.tasks import own_task
    from vivace.runtime.workloads import checked_request

    located = find_model(model)
    if located.model.is_synthetic:
        raise UsageError(f"{model} has random weights: its images show nothing that a witness could judge")
    if own_task(located.pipeline) != "text":
        raise UsageError(
            f"{model} draws from images; witnesses are calibrated on images drawn from text alone"
        )
    if not request.prompts and request.prompt_set is None:
        request = request.model_copy(update={"prompt_set": located.prompt_set})
    return checked_request(model, "baseline", workload=request)


def _judges(prepared: CheckedRequest, names: Sequence[str]) -> list[LocatedJudge]:
    from vivace.benchmark.studies import USUAL_SCORER, find_judges
    from vivace.foundation.spec.study import QualityRequest
    from vivace.models.scorers import LocatedJudge, find_judge

    if names:
        return [find_judge(name) for name in dict.fromkeys(names)]
    own = find_judges(prepared.located, QualityRequest())
    if own is None:
        raise UsageError(
            f"no CLIP model that judges images is on this machine; give --witness clip:NAME, e.g. clip:{USUAL_SCORER}"
        )
    return [LocatedJudge("clip", own)]


def _draw(prepared: CheckedRequest, images: CalibrationImages, device: str) -> int:
    from vivace.cli.watched.guarded import guarded
    from vivace.measure.calibrating import draw_missing
    from vivace.measure.machine import choose_device

    if not images.missing:
        click.echo(f"{len(images.prompts)} images are drawn already", err=True)
        return 0

    def draw(is_read: Callable[[], None]) -> int:
        draw_missing(prepared, images, choose_device(device), is_read, _counting("drawn"))
        return 0

    return guarded(prepared.located, draw)


def _calibrate(
    prepared: CheckedRequest,
    images: CalibrationImages,
    judge: LocatedJudge,
    kinds: Sequence[DamageKind],
    grade: int,
    device: str,
) -> int:
    from vivace.cli.watched.guarded import guarded_scorers
    from vivace.measure.calibrating import calibrate_witness
    from vivace.measure.machine import choose_device

    def score(is_read: Callable[[], None]) -> int:
        calibrate_witness(
            prepared, images, judge, kinds, grade, choose_device(device), is_read, _counting("scored")
        )
        return 0

    click.echo(f"{judge.scorer.name}:", err=True)
    return guarded_scorers([judge.scorer], score)


def _kept(prepared: CheckedRequest, judge: LocatedJudge) -> WitnessCalibration:
    from vivace.measure.witness_limits import kept

    calibration = kept(prepared.located.model.identity, judge.scorer.id)
    assert calibration is not None, "it was just written"
    return calibration


def _counting(what: str) -> Callable[[int, int], None]:
    return lambda done, total: click.echo(f"[{done}/{total}] {what}", err=True)


def _facts(calibration: WitnessCalibration) -> dict[str, str]:
    from vivace.measure.witness_limits import file_of

    visible = [_seen(row, calibration.grade) for row in calibration.damage if _is_detected(row, calibration)]
    unseen = [row.damage for row in calibration.damage if not _is_detected(row, calibration)]
    harmless = ", ".join(f"{name} {100 * low:.1f} %" for name, low in calibration.harmless.items())
    limit = (
        f"{100 * calibration.limit:.4g} % of the margin"
        if calibration.limit is not None
        else f"none: no damage of grade {calibration.grade} can be told from a harmless change; the usual limit stays"
    )
    return {
        "model": calibration.model,
        "witness": calibration.scorer,
        "images": f"{calibration.num_images} of {calibration.num_prompts} prompts",
        "margin": f"{calibration.margin:.2f} points over other prompts",
        "limit": limit,
        "harmless": f"keeps at least {harmless}",
        "sees": ", ".join(visible) or "nothing",
        "does not": f"see {', '.join(unseen)}: other figures have to" if unseen else "-",
        "saved to": str(file_of(calibration.model, calibration.scorer)),
    }


def _is_detected(row: SeenDamage, calibration: WitnessCalibration) -> bool:
    return row.seen_from is not None or row.damage not in calibration.faint


def _seen(row: SeenDamage, grade: int) -> str:
    """Return the lowest grade from which damage is detected. With so few prompts, another run may differ."""
    if row.seen_from is None:
        return f"{row.damage} of {row.strengths[grade - 1]:g} {row.unit} here, but not in nine of ten runs"
    return f"{row.damage} from {row.seen_from:g} {row.unit}"
