"""Compare the memory that `vivace plan` predicts for each trial with what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.answers.formatting import size
from vivace.benchmark.rounds.worker_requests import PredictionsRequest
from vivace.errors import VivaceError, WorkerError
from vivace.foundation.processes.launcher import Launcher, last_line
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Memory, Outcome, Record
from vivace.foundation.spec.trial import Trial
from vivace.machinery.technique import Machine

_TIMEOUT_S = 120.0  # per trial; most take two or three seconds


@dataclass(frozen=True)
class Planned:
    """The measured and the predicted memory of one record.

    Attributes:
        measured: of the round with the largest peak.
        model_bytes, peak_bytes, peak_stage: the prediction; None if there is none.
        reason: why there is no prediction.
    """

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
    """Predict the memory of every trial that was measured on a GPU, in a separate process.

    Call it after all timing: it takes seconds, but no GPU. Records of a CPU are left out, since `vivace plan` does not
    predict a CPU's resident set.
    """
    measured = [(record, memory) for record in records if (memory := _measured_memory(record)) is not None]
    if not measured:
        return []
    request = PredictionsRequest(
        trials=tuple(record.trial for record, _ in measured), environment=measured[0][0].environment
    )
    timeout_s = _TIMEOUT_S * len(measured)
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
    ending = launcher.run(request, _TIMEOUT_S * len(trials))
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
    """Return the GPU that a record was made on, as techniques see it."""
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
