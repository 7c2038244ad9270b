"""vivace calibrate witness"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
from pydantic import Field

from vivace.cli.command import AsJson, command, interrupted
from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    CallSettings,
    DeviceName,
    ModelName,
    NumSeeds,
    Option,
    Prompts,
    Store,
    Threads,
)
from vivace.foundation.spec.study import PromptSet, WorkloadRequest

if TYPE_CHECKING:
    from vivace.foundation.spec.limits import SeenDamage, WitnessCalibration
    from vivace.measure.calibrating import CalibrationImages
    from vivace.measure.damage import DamageKind
    from vivace.models.scorers import LocatedJudge
    from vivace.runtime.workloads import CheckedRequest

_WIDTH = 10
"""Width of the answer's labels, characters."""


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
    click.echo("\n\n".join("\n".join(_lines(calibration)) for calibration in calibrations))
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
        draw_missing(prepared, images, choose_device(device), is_read, _progress("drawn"))
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
            prepared, images, judge, kinds, grade, choose_device(device), is_read, _progress("scored")
        )
        return 0

    click.echo(f"{judge.scorer.name}:", err=True)
    return guarded_scorers([judge.scorer], score)


def _kept(prepared: CheckedRequest, judge: LocatedJudge) -> WitnessCalibration:
    from vivace.measure.witness_limits import kept

    calibration = kept(prepared.located.model.identity, judge.scorer.id)
    assert calibration is not None, "it was just written"
    return calibration


def _progress(what: str) -> Callable[[int, int], None]:
    return lambda done, total: click.echo(f"[{done}/{total}] {what}", err=True)


def _lines(calibration: WitnessCalibration) -> list[str]:
    from vivace.measure.witness_limits import file_of

    visible = [_seen(row, calibration.grade) for row in calibration.damage if _is_detected(row, calibration)]
    unseen = [row.damage for row in calibration.damage if not _is_detected(row, calibration)]
    harmless = ", ".join(f"{name} {100 * low:.1f} %" for name, low in calibration.harmless.items())
    limit = (
        f"{100 * calibration.limit:.4g} % of the margin"
        if calibration.limit is not None
        else f"none: no damage of grade {calibration.grade} can be told from a harmless change; the usual limit stays"
    )
    rows = {
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
    return [f"{name:{_WIDTH}}{text}" for name, text in rows.items()]


def _is_detected(row: SeenDamage, calibration: WitnessCalibration) -> bool:
    return row.seen_from is not None or row.damage not in calibration.faint


def _seen(row: SeenDamage, grade: int) -> str:
    """Return the lowest grade from which damage is detected. With so few prompts, another run may differ."""
    if row.seen_from is None:
        return f"{row.damage} of {row.strengths[grade - 1]:g} {row.unit} here, but not in nine of ten runs"
    return f"{row.damage} from {row.seen_from:g} {row.unit}"
