"""Pipelines that a program holds or makes: measured in its own process, each recipe on a pipeline of its own."""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vivace.benchmark.comparison import Comparison
from vivace.benchmark.rounds.worker import answer
from vivace.benchmark.rounds.worker_requests import WORKER, AnyRequest
from vivace.errors import UsageError, VivaceError
from vivace.foundation.processes.launcher import Ending, Launcher, OnEvent
from vivace.foundation.spec.trial import Model
from vivace.machinery.technique import component_of
from vivace.measure.accelerator import empty_cache, plain_tensors, weights_bytes
from vivace.measure.machine import torch_type
from vivace.models.find import LIVE, SMALL_BYTES, LocatedModel
from vivace.runtime.calls import signature_defaults

_SAMPLES = 256  # values of each tensor that identify weights


@dataclass(frozen=True)
class LiveModel(LocatedModel):
    """A pipeline of this process, and torch's type of device where it is."""

    kind: str = ""
    device: str = "cpu"
    num_bytes: int = 0
    numbers: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pipeline(self) -> str:
        return self.kind

    @property
    def defaults(self) -> dict[str, Any]:
        return dict(self.numbers)

    @property
    def call(self) -> dict[str, Any]:
        return {}

    @property
    def is_small(self) -> bool:
        return self.num_bytes < SMALL_BYTES

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    @property
    def tiny_vae(self) -> None:
        return None


class InThisProcess(Launcher):
    """Answers requests in this process. Nothing limits their time, and a crash ends the program."""

    def __init__(self) -> None:
        super().__init__(WORKER, tries_gpu=False)

    def run(self, request: Any, timeout_s: float, on_event: OnEvent = lambda _: None) -> Ending:
        import torch

        threads, log = torch.get_num_threads(), io.StringIO()
        asked: AnyRequest = request
        try:
            torch.set_num_threads(asked.threads or threads)
            with contextlib.redirect_stderr(log):
                value = answer(asked, on_event)
        except VivaceError as error:
            value = {"error": str(error)}
        finally:
            torch.set_num_threads(threads)
            gc.collect()
            if torch.cuda.is_initialized():
                empty_cache("cuda")
        return Ending(value, log=log.getvalue()[-10_000:])


@contextlib.contextmanager
def live_model(source: Any) -> Iterator[LiveModel]:
    """Make a model of a pipeline, or of a function that makes one, which is found by its name inside the context."""
    from diffusers import DiffusionPipeline

    pipe = source() if callable(source) and not isinstance(source, type | DiffusionPipeline) else source
    if not isinstance(pipe, DiffusionPipeline):
        raise UsageError(
            f"vivace.bench: model={source!r:.60} must be the name of a model, a diffusers pipeline, or a function that "
            "makes one"
        )
    kind = type(pipe).__name__
    located = LiveModel(
        model=Model(name=kind, source="object", revision=_revision(pipe)),
        folder=None,
        entry=None,
        make=(lambda: copy.deepcopy(pipe)) if pipe is source else source,
        kind=kind,
        device=torch_type(pipe.device),
        num_bytes=weights_bytes(pipe),
        numbers={"guidance_scale": 0.0} | _size(pipe) | signature_defaults(pipe),
    )
    LIVE[kind] = located
    try:
        yield located
    finally:
        del LIVE[kind]


def check_live(comparisons: Sequence[Comparison]) -> None:
    """Raise UsageError for a recipe that needs processes of its own."""
    for recipe in (recipe for comparison in comparisons for recipe in comparison.recipes):
        if any(technique.facts.num_gpus > 1 for technique in recipe):
            raise UsageError(
                f"{recipe.text} starts a process on each GPU, and a pipeline of this program has but one; give "
                "bench the name or the folder of the model"
            )


def _size(pipe: Any) -> dict[str, int]:
    """Return the size that a pipeline draws by default; empty where it does not say."""
    denoiser: Any = component_of(pipe, "denoiser")
    sample = getattr(pipe, "default_sample_size", None) or getattr(
        getattr(denoiser, "config", None), "sample_size", None
    )
    scale = getattr(pipe, "vae_scale_factor", None)
    if not isinstance(sample, int) or not isinstance(scale, int):
        return {}
    return {"height": sample * scale, "width": sample * scale}


def _revision(pipe: Any) -> str:
    """Identify the weights by their names, shapes and some of their values, and the scheduler by its settings."""
    import torch

    total = hashlib.sha256(repr(sorted(dict(pipe.scheduler.config).items(), key=str)).encode())
    for name, part in sorted(pipe.components.items()):
        tensors = part.state_dict().items() if isinstance(part, torch.nn.Module) else ()
        for key, tensor in tensors:
            total.update(f"{name}.{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for plain in plain_tensors(tensor):
                values = plain.detach().flatten()
                some = values[:: max(1, len(values) // _SAMPLES)]
                total.update(some.to("cpu", torch.float32).numpy().tobytes())
    return total.hexdigest()[:16]
