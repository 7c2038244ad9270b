"""Count the operations of a recipe's call, to compare its time with the limits of the device.

A pipeline without weights (`vivace.runtime.memory.weightless`) gets those techniques of the recipe that change what is
computed: another VAE, fewer steps, hits of a step cache. Then its call runs on the meta device, and the operations of
each component are counted. The others change how it is computed; they decide the precision, and with it the ceiling.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.answers.formatting import size
from vivace.architectures import CATALOGUE
from vivace.architectures.entry import few_steps_of
from vivace.benchmark.progress import Deadline, is_over, limit_s
from vivace.benchmark.rounds.worker_requests import PredictionsRequest, WorkRequest
from vivace.benchmark.store import Store
from vivace.errors import NoEffect, Unsupported, VivaceError, WorkerError
from vivace.foundation.processes.launcher import Launcher, last_line
from vivace.foundation.spec.ceilings import Work
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Memory, Outcome, Record, Round
from vivace.foundation.spec.trial import Trial
from vivace.machinery.technique import (
    Machine,
    ModelFacts,
    Placement,
    Stage,
    Target,
)
from vivace.machinery.technique.anatomy import DENOISERS
from vivace.measure.measured_ceilings import known_ceilings
from vivace.models.find import SYNTHETIC
from vivace.models.quiet import quiet
from vivace.recipes.recipe import Recipe
from vivace.runtime.calls import encode, follow_denoiser
from vivace.runtime.memory.footprint import Footprint
from vivace.runtime.memory.operation_counts import watch, work_of
from vivace.runtime.memory.predict import built_for, images_for, predict_trial
from vivace.runtime.memory.weightless import find_weightless, run_without_values
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.session import Session

_TIMEOUT_S = 300.0
_CHANGES_WORK = {
    Stage.SWAP,
    Stage.PRUNE,
    Stage.PRECISION,
    Stage.ADAPT,
    Stage.SPLIT,
    Stage.CACHE,
    Stage.SCHEDULE,
}
_CHANGES_WEIGHTS = {Stage.FUSE, Stage.QUANTIZE}
_TOLERATED_HITS = 0.05
"""Tolerated error of the share of hits: a schedule of whole steps cannot reach every share."""


def add_work(
    records: Sequence[Record], store: Store, launcher: Launcher, deadline: Deadline | None = None
) -> list[Record]:
    """Store the ceilings of the records' device and the operations of each recipe with the latest round of each trial.

    Call it after all timing: it takes seconds a recipe, but no GPU. Does nothing if no ceilings of this device were
    measured on this machine (`vivace doctor --measure`), or if they are stored already. Work not counted by the
    deadline is left out.

    Returns:
        The records, with what was added.
    """
    ceilings = known_ceilings(records[0].environment) if records else None
    if ceilings is None:
        return list(records)
    counted = []
    for record in records:
        measured = [r for r in record.rounds if r.outcome is Outcome.MEASURED]
        lacks = record.outcome is Outcome.MEASURED and not any(r.ceilings == ceilings for r in measured)
        if lacks and not is_over(deadline):
            latest = max(measured, key=lambda r: r.index)
            work = next((r.work for r in measured if r.work is not None and r.work.components), None)
            work = work or count_by_worker(record, latest, launcher, limit_s(_TIMEOUT_S, deadline))
            if not work.components and is_over(deadline):
                counted.append(record)
                continue
            stored = store.rounds(record.trial.key(record.environment))[latest.index]
            added = {"work": work, "ceilings": ceilings}
            store.append(record.trial.key(record.environment), stored.model_copy(update=added))
            rounds = [r.model_copy(update=added) if r is latest else r for r in record.rounds]
            record = record.model_copy(update={"rounds": tuple(rounds)})
        counted.append(record)
    return counted


def count_by_worker(record: Record, round_: Round, launcher: Launcher, timeout_s: float = _TIMEOUT_S) -> Work:
    """Return the work of a measured trial, counted by a worker. A failure becomes a reason; the measurements stay."""
    hits = round_.evidence.get("cache_hit_rate")
    request = WorkRequest(
        trial=record.trial,
        environment=record.environment,
        hits=hits if isinstance(hits, float) else None,
        denoiser_calls=round_.samples[0].num_denoiser_calls if round_.samples else 0,
    )
    try:
        ending = launcher.run(request, timeout_s)
    except WorkerError as error:
        return Work(reason=str(error))
    if ending.value is not None:
        return Work.model_validate(ending.value)
    slow = f"counting took longer than {timeout_s:g} s"
    return Work(reason=slow if ending.timed_out else last_line(ending.log) or str(ending))


def count_work(trial: Trial, environment: Environment, hits: float | None, denoiser_calls: int) -> Work:
    """Count a trial's work, which must reproduce the measured share of hits of a step cache and the denoiser's calls.
    Runs in the worker."""
    try:
        return _count(trial, environment, hits, denoiser_calls)
    except VivaceError as error:
        return Work(reason=str(error))
    except Exception as error:  # noqa: BLE001  a model's code may fail in any way without values
        text = str(error).strip()
        return Work(reason=f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}")


def _count(trial: Trial, environment: Environment, hits: float | None, denoiser_calls: int) -> Work:
    recipe = Recipe.from_spec(trial.recipe)
    if any(technique.facts.num_gpus > 1 for technique in recipe):
        raise Unsupported("one image on several GPUs has no limit of one GPU")
    twin = recipe.without(*[t for t in recipe if t.facts.stage not in _CHANGES_WORK])
    workload = trial.workload
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers warns about its own code
        session = _session(trial, environment, twin, hits, denoiser_calls)
        pipe = session.pipe
        prompts = [prompt for _, prompt, _ in workload.calls()[0]]
        arguments: dict[str, Any] = {"prompt": prompts if len(prompts) > 1 else prompts[0]}
        if workload.text == "embeddings":
            arguments = encode(session, prompts, workload.task)
        arguments |= images_for(pipe, workload.task, workload.call, len(prompts))
        session(
            **arguments, num_inference_steps=workload.steps_that_run(1), output_type="pt"
        )  # timed calls are not the first either
        before = _hits(session)
        footprint = Footprint()
        operations = footprint.operations
        keeps_state = any(technique.facts.stage is Stage.CACHE for technique in twin)
        watch(pipe, operations, traces_all=keeps_state)
        with footprint.following():
            session(**arguments, output_type="pt")
        skipped = _hits(session) - before
    calls = operations.calls["denoiser"]
    if calls != denoiser_calls:
        raise Unsupported(
            f"the count has {calls} calls of the denoiser, and a timed call had {denoiser_calls}"
        )
    if hits is not None and abs(skipped / calls - hits) > max(_TOLERATED_HITS, 1 / calls):
        raise Unsupported(f"the count has hits in {skipped} of {calls} calls, and {hits:.0%} were measured")
    weights = _stored_bytes(trial, recipe, environment)
    components = []
    for part in work_of(pipe, operations, recipe.techniques, environment.device).components:
        changed = {"weights_bytes": min(part.weights_bytes, weights.get(part.component, part.weights_bytes))}
        if part.component == "denoiser":
            changed["computed"] = part.calls - skipped
        components.append(part.model_copy(update=changed))
    return Work(components=tuple(components))


def _session(
    trial: Trial, environment: Environment, recipe: Recipe, hits: float | None, calls: int
) -> Session:
    model = find_weightless(trial.model.name)
    pipe = built_for(model, trial.workload.task, environment.device)
    workload = trial.workload
    facts = ModelFacts(
        defaults=model.defaults | workload.call,
        load_tiny_vae=model.build_tiny_vae,
        distillations=few_steps_of(CATALOGUE.get(model.name.removeprefix(SYNTHETIC))),
        has_weights=False,
        # The first step is never a hit; `hits` is a share of the steps after it.
        hits=None if hits is None else min(0.999, hits * calls / max(1, calls - 1)),
    )
    target = Target(Placement(machine_of(environment)), pipe, facts)
    try:
        session = Session(pipe, recipe, target)
    except NoEffect as error:
        if not error.already_so:
            raise
        # What had an effect beside it, such as quantising, is not among the recipe's techniques here.
        session = Session(pipe, Recipe(), target)
    follow_denoiser(pipe, "meta")
    draw_noise_in_fp32(pipe)
    run_without_values(pipe, trial.workload.height, trial.workload.width)
    return session


def _hits(session: Session) -> int:
    evidence = session.evidence()
    rate, calls = evidence.get("cache_hit_rate", 0.0), evidence.get("cache_calls", 0)
    assert isinstance(rate, float | int)
    assert isinstance(calls, int)
    return round(rate * calls)


def _stored_bytes(trial: Trial, recipe: Recipe, environment: Environment) -> dict[str, int]:
    if not any(technique.declared.stage in _CHANGES_WEIGHTS for technique in recipe):
        return {}
    storing = recipe.without(*[t.name for t in recipe if t.declared.stage > max(_CHANGES_WEIGHTS)])
    stored = trial.model_copy(update={"recipe": storing.spec})
    components = predict_trial(stored, machine_of(environment)).components
    return {"denoiser" if each.name in DENOISERS else each.name: each.num_bytes for each in components}


_PREDICTION_S = 120.0  # per trial; most take two or three seconds


@dataclass(frozen=True)
class Planned:
    """The measured memory of one record, of the round with the largest peak, and the predicted one or the reason for
    having none."""

    record: Record
    measured: Memory
    model_bytes: int | None = None
    peak_bytes: int | None = None
    peak_stage: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        """ "plan, tiny_vae: model 5.4 GB (measured 5.4 GB, -0.1 %), peak 8.1 GB (measured 8.2 GB, -1.2 %) in vae"."""
        recipe = self.record.trial.recipe.text
        if self.model_bytes is None or self.peak_bytes is None:
            return f"plan, {recipe}: no prediction: {self.reason}"
        model = _with_error(self.model_bytes, self.measured.model_bytes)
        peak = _with_error(self.peak_bytes, self.measured.peak_bytes)
        return f"plan, {recipe}: model {model}, peak {peak}, in stage {self.peak_stage}"


def plan_again(records: Sequence[Record], launcher: Launcher) -> list[Planned]:
    """Predict, after all timing and in a separate process, the memory of every trial that was measured on a GPU."""
    measured = [(record, memory) for record in records if (memory := _measured_memory(record)) is not None]
    if not measured:
        return []
    request = PredictionsRequest(
        trials=tuple(record.trial for record, _ in measured), environment=measured[0][0].environment
    )
    timeout_s = _PREDICTION_S * len(measured)
    try:
        ending = launcher.run(request, timeout_s)
    except WorkerError as error:  # the measurements are shown without predictions
        return [Planned(record, memory, reason=str(error)) for record, memory in measured]
    if ending.value is None:
        why = (
            f"it took longer than {timeout_s:g} s"
            if ending.timed_out
            else last_line(ending.log) or str(ending)
        )
        return [Planned(record, memory, reason=why) for record, memory in measured]
    answers = ending.value["predictions"]
    return [
        Planned(record, memory, **fields) for (record, memory), fields in zip(measured, answers, strict=True)
    ]


def predict_by_worker(
    trials: Sequence[Trial], environment: Environment, launcher: Launcher
) -> list[float | None]:
    """Return the predicted peak of each trial on the GPU of an environment, bytes; None where there is none."""
    request = PredictionsRequest(trials=tuple(trials), environment=environment)
    ending = launcher.run(request, _PREDICTION_S * len(trials))
    if ending.value is None:
        return [None] * len(trials)
    return [answer.get("peak_bytes") for answer in ending.value["predictions"]]


def predict_all(trials: Sequence[Trial], environment: Environment) -> list[dict[str, Any]]:
    """Return the predicted fields of a `Planned` for each trial. Runs in the worker."""
    from vivace.runtime.memory.predict import predict_trial

    machine = machine_of(environment)
    predictions: list[dict[str, Any]] = []
    for trial in trials:
        try:
            predicted = predict_trial(trial, machine)
        except VivaceError as error:
            predictions.append({"reason": str(error)})
        else:
            predictions.append(predicted.model_dump(include={"model_bytes", "peak_bytes", "peak_stage"}))
    return predictions


def machine_of(environment: Environment) -> Machine:
    capability = None
    if environment.device_capability is not None:
        major, minor = environment.device_capability.split(".")
        capability = (int(major), int(minor))
    return Machine(
        device=environment.device, device_name=environment.device_name, capability=capability, compiler=None
    )


def _measured_memory(record: Record) -> Memory | None:
    if record.environment.device != "cuda" or record.outcome is not Outcome.MEASURED:
        return None
    return max((r.memory for r in record.rounds if r.memory), key=lambda m: m.peak_bytes, default=None)


def _with_error(predicted: int, measured: int) -> str:
    if measured == 0:  # `offload(model)` leaves nothing on the GPU between calls
        return f"{size(predicted)} (measured {size(measured)})"
    # Adding 0.0 turns -0.0 into 0.0, which prints without a minus sign.
    error = round(100 * (predicted / measured - 1), 1) + 0.0
    return f"{size(predicted)} (measured {size(measured)}, {error:+.1f} %)"
