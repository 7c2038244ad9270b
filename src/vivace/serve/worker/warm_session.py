"""A session that draws for a server: warmed at its sizes, with LoRAs by request, and partial images."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UnusableModel, VivaceError
from vivace.machinery.lora.hot import denoiser_layers, hot_loras
from vivace.machinery.lora.lora_files import CONFIG, locate_lora
from vivace.machinery.lora.read_lora import read_lora
from vivace.techniques.lora import Lora

if TYPE_CHECKING:
    from vivace.runtime.session import Session

import contextlib
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vivace.architectures import pipeline_named
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.workload import Task
from vivace.machinery.technique import call_parameters
from vivace.measure.nvml import NvmlGpu, opened_gpu
from vivace.measure.surroundings import machine_bytes
from vivace.models.find import LocatedModel, find_model
from vivace.models.sources import example_images
from vivace.models.tasks import edits_too, own_task, rounds_up
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import accepted_by
from vivace.runtime.finite_images import has_one_colour, hidden_images
from vivace.runtime.opening import session_of
from vivace.runtime.pipelines import pipeline_for
from vivace.runtime.session import Session
from vivace.serve.queue.messages import Draw, Load, image_file
from vivace.serve.worker.pixels import Pixels, Projection, fit_projection, returns_tensors
from vivace.serve.worker.speeds import CallTimes, in_few_steps, phases_of, time_batches, time_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from vivace.foundation.spec.workload import Task
    from vivace.recipes.recipe import Recipe
    from vivace.runtime.session import Session


_KEPT_BYTES = 1_000_000_000
"""Bytes of parsed files that are kept, the last ones that were used."""
_NONE = 0.0
"""The factor of a LoRA that is beside the layers and adds nothing."""


@dataclass
class LoraFolder:
    """LoRA files that fit the model, with their ranks, why others do not, and the one that is loaded."""

    fitting: dict[str, int] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    _loaded: tuple[str | int, ...] | None = None
    _scale: float = _NONE
    """NaN while unknown, after a failed exchange."""

    @property
    def technique(self) -> str:
        """The technique that reserves every layer for the largest rank, in recipe notation."""
        first = next(iter(self.fitting))
        return f"lora({first!r}, hot=True, layers=all, max_rank={max(self.fitting.values())})"

    def check_loaded(self, session: Session) -> None:
        """Load each file once beside the layers of the session; what is refused is unfit."""
        for lora in hot_loras(session.pipe):
            lora.keep_bytes = _KEPT_BYTES
        for path in list(self.fitting):
            try:
                session.set_lora(path, scale=_NONE)
            except VivaceError as error:
                del self.fitting[path]
                self.unfit[path] = _without_folder(path, error)
        self._loaded, self._scale = None, _NONE

    def check_any(self) -> None:
        """Raise UnusableModel, with the reasons, if no file fits."""
        if not self.fitting:
            reasons = "; ".join(f"{Path(path).stem}: {reason}" for path, reason in self.unfit.items())
            raise UnusableModel(f"--loras: no file fits the model ({reasons})")

    def exchange(self, session: Session, lora: tuple[str, float] | None) -> float:
        """Load a LoRA with its factor, or none, unless it is loaded; return the seconds."""
        began = time.perf_counter()
        if lora is not None:
            self._load(session, *lora)
        elif self._scale != _NONE:
            session.set_lora(scale=_NONE)
            self._scale = _NONE
        return time.perf_counter() - began

    def _load(self, session: Session, path: str, scale: float) -> None:
        try:
            identity = _identity(path)
            if identity != self._loaded:
                self._loaded, self._scale = None, math.nan  # unknown until it has worked
                session.set_lora(path, scale=scale)
            elif scale != self._scale:
                session.set_lora(scale=scale)
            after = _identity(path)
        except VivaceError as error:
            raise Unsupported(_without_folder(path, error)) from None
        except OSError as error:
            raise Unsupported(_unreadable(path, error)) from None
        if after != identity:  # what was read may be of both files
            self._loaded = None
            raise Unsupported(f"{Path(path).name} was written anew while it was read; send the request again")
        self._loaded, self._scale = identity, scale


def fitting_loras(pipe: Any, paths: Sequence[str]) -> LoraFolder:
    folder = LoraFolder()
    components = Lora.declared.default_targets
    for path in paths:
        try:
            _identity(path)
            layers = denoiser_layers(pipe, path, read_lora(pipe, locate_lora(path), path), components)
        except VivaceError as error:
            folder.unfit[path] = _without_folder(path, error)
        except OSError as error:
            folder.unfit[path] = _unreadable(path, error)
        else:
            folder.fitting[path] = max(layer.rank for layer in layers.values())
    return folder


def _without_folder(path: str, error: VivaceError) -> str:
    """Return the reason why a file is refused, without the place of the server's folder."""
    return str(error).replace(path, Path(path).name)


def _unreadable(path: str, error: OSError) -> str:
    return f"{Path(path).name} cannot be read any more: {error.strerror}"


def _identity(path: str) -> tuple[str | int, ...]:
    """Return what changes with a file's content: its times too, since an editor may keep that of its last change.

    The json with PEFT's settings beside it counts as well, since alpha is in it.
    """
    files = [Path(path)]
    if (settings := files[0].with_name(CONFIG)).exists():
        files.append(settings)
    stats = [file.stat() for file in files]
    return path, *(
        number
        for status in stats
        for number in (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    )


_SHARED: tuple[Task, ...] = ("image", "inpaint")
_WARM_STEPS = 2


@dataclass
class Editing:
    """Sessions that draw from images, by their task, and why others are not served; `published` is the class of the
    pipeline that the model is published for."""

    published: str
    sessions: dict[Task, Session] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, located: LocatedModel, session: Session, task: Task | None) -> Editing:
        """Return the sessions that draw from images: one opened for the only task, or those of all its weights do."""
        editing = cls(located.pipeline)
        opened = task or own_task(located.pipeline)
        if opened != "text":
            editing.sessions[opened] = session
        elif task is None:
            for other in (*_SHARED, "edit") if edits_too(located.pipeline) else _SHARED:
                editing._try(other, lambda other=other: session.sharing_weights(other, located.model.name))  # type: ignore[misc]
        return editing

    def warm(self, sizes: Iterable[tuple[int, int]], report: Callable[[str], None]) -> None:
        """Draw once at each size, so that later images compile nothing; a task that does not work is not served."""
        for task, session in list(self.sessions.items()):
            for width, height in sizes:
                report(f"warming {task} at {width}x{height}")
                if not self._try(task, lambda: _draw(session, width, height, task)):  # noqa: B023 - called at once
                    break

    def state(self) -> dict[str, Any]:
        sessions = list(self.sessions.values())
        takes = set.intersection(*(accepted_by(session.pipe) for session in sessions)) if sessions else set()
        strengths = [
            parameter.default
            for session in sessions
            if (parameter := call_parameters(session.pipe).get("strength")) is not None
            and parameter.default is not inspect.Parameter.empty
        ]
        known = [pipeline_named(type(session.pipe).__name__) for session in sessions]
        return {
            "tasks": sorted(self.sessions),
            "refused": self.refused,
            "takes": sorted(takes),
            "strength": float(strengths[0]) if strengths else None,
            "rounds_up": rounds_up(self.published),
            "most_images": max((each.most_images for each in known if each is not None), default=1),
        }

    def _try(self, task: Task, do: Callable[[], Session | None]) -> bool:
        """Run a function for a task; note the reason if it fails."""
        try:
            made = do()
        except VivaceError as error:
            self.refused[task] = str(error)
        except Exception as error:  # noqa: BLE001 - a task that breaks must not end the others
            traceback.print_exc()
            self.refused[task] = f"{type(error).__name__}: {error}"
        else:
            if made is not None:
                self.sessions[task] = made
            return True
        self.sessions.pop(task, None)
        return False


def _draw(session: Session, width: int, height: int, task: Task) -> None:
    import torch

    size = {"width": width, "height": height}
    call: dict[str, Any] = size | example_images(type(session.pipe).__name__, size, task)
    if "strength" in accepted_by(session.pipe):
        call["strength"] = 1.0

    def draw(steps: int) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        session("an apple", num_inference_steps=steps, generator=generator, **call)

    in_few_steps(session, _WARM_STEPS, draw)


_VERBOSITY = "DIFFUSERS_VERBOSITY"
_SHORT = 60
"""Characters of a prompt that every text encoder reads whole."""
_GB = 1e9
Report = Callable[[str, dict[str, Any]], None]
Finish = Callable[[], dict[str, Any]]
"""Waits for a call's images, puts them into files, and returns facts about them."""


class EnergyMeter:
    """Reads the driver's counter of this process's GPU, if there is one; it moves about ten times a second."""

    def __init__(self, gpu: NvmlGpu | None) -> None:
        self._gpu = gpu
        self._last = None if gpu is None else gpu.energy_j()

    @classmethod
    def of_this_process(cls) -> EnergyMeter:
        """Open the GPU for as long as the process lives; called once CUDA is in use."""
        gpu = contextlib.ExitStack().enter_context(opened_gpu())
        return cls(gpu if isinstance(gpu, NvmlGpu) else None)

    def since_last(self) -> dict[str, float]:
        """Return the joules since the last call, as a field of an event; nothing where there are none."""
        now, before = None if self._gpu is None else self._gpu.energy_j(), self._last
        self._last = now
        return {} if now is None or before is None else {"energy_j": now - before}


@dataclass
class Drawing:
    """A session with its measurements by size; `editing` has those of other tasks, which share its weights."""

    session: Session
    load_request: Load
    multiple: int
    draws_text: bool
    editing: Editing
    loras: LoraFolder
    speeds: dict[str, dict[str, float]] = field(default_factory=dict)
    batching: dict[str, dict[str, Any]] = field(default_factory=dict)
    projection: Projection | None = None
    notes: list[str] = field(default_factory=list)
    energy: EnergyMeter = field(default_factory=lambda: EnergyMeter(None))

    @classmethod
    def load(cls, request: Load, report: Callable[[str], None]) -> Drawing:
        """Load the model, apply the recipe, and draw at each size; VivaceError if that does not work here."""
        import torch

        from vivace.benchmark.comparison import default_threads
        from vivace.measure.machine import check_works, choose_device
        from vivace.models.find import obtain

        report(f"loading {request.model}")
        keep_prompts_out_of_logs()
        device = choose_device(request.device)
        check_works(device)
        recipe = resolve(request.recipe)
        if (num_bytes := memory_of(device)) is not None:
            place = "this machine" if device == "cpu" else "this GPU"
            check_fits(request.model, recipe, request.sizes, request.task, num_bytes, place)
        located = obtain(find_model(request.model))
        torch.set_num_threads(request.threads or default_threads(located))
        pipe = pipeline_for(located, recipe, device, request.task, None)
        loras = LoraFolder()
        if request.loras:
            report(f"checking {len(request.loras)} LoRAs")
            loras = fitting_loras(pipe, request.loras)
            if not request.is_restart:  # later, files may be gone, and images without one are drawn as before
                loras.check_any()
        if loras.fitting:
            recipe = resolve(f"{recipe.text}+{loras.technique}".removeprefix("baseline+"))
        report(f"applying {request.recipe}{', with room for LoRAs' if loras.fitting else ''}")
        session = session_of(pipe, located, recipe, device)
        session.pipe.set_progress_bar_config(disable=True)
        if loras.fitting:
            loras.check_loaded(session)
            if not request.is_restart:
                loras.check_any()
        drawing = cls(
            session,
            request,
            located.entry.size_multiple if located.entry is not None else 8,
            (request.task or own_task(located.pipeline)) == "text",
            Editing.of(located, session, request.task),
            loras,
            notes=list(session.warnings),
        )
        sizes = request.sizes or (drawing.own_size,)
        for width, height in sizes:
            report(f"warming {width}x{height}")
            drawing.warm(width, height)
        drawing.editing.warm(sizes, report)
        drawing.energy = EnergyMeter.of_this_process()
        return drawing

    @property
    def own_size(self) -> tuple[int, int]:
        defaults = self.session.defaults
        return int(defaults["width"]), int(defaults["height"])

    def warm(self, width: int, height: int) -> None:
        """Draw once at a size, so that later images compile nothing, and keep the times."""
        timed = time_size(self.session, width, height)
        self.speeds[f"{width}x{height}"] = {"step_s": timed.step_s, "rest_s": timed.rest_s}
        if self.projection is None and timed.latents is not None:
            self.projection = fit_projection(self.session.pipe, timed.latents, timed.image)
        if self.load_request.batches and self.draws_text:
            batches = self.load_request.batches
            self.batching[f"{width}x{height}"] = time_batches(self.session, width, height, batches)

    def state(self) -> dict[str, Any]:
        from vivace.architectures import family_of
        from vivace.machinery.technique import component_of
        from vivace.runtime.calls import accepted_by

        session, defaults = self.session, self.session.defaults
        family = family_of(component_of(session.pipe, "denoiser"))
        guidance = defaults.get("guidance_scale")
        takes = accepted_by(session.pipe)
        off = 1.0 if family is None or family.doubled is None else family.doubled.off
        width, height = self.own_size
        return {
            "name": self.load_request.model,
            "recipe": session.recipe.text,
            "device": session.device,
            "steps": int(defaults["num_inference_steps"]),
            "guidance": None if guidance is None else float(guidance),
            "size": f"{width}x{height}",
            "multiple": self.multiple,
            "takes": sorted(takes),
            "guided_above": off if "negative_prompt" in takes else None,
            "speeds": self.speeds,
            "has_partials": self.projection is not None,
            "notes": self.notes,
            "draws_text": self.draws_text,
            "edits": self.editing.state(),
            "batching": self.batching,
            "unfit_loras": self.loras.unfit,
        }

    def cancel(self) -> None:
        for session in (self.session, *self.editing.sessions.values()):
            session.cancel()

    def draw(self, request: Draw, report: Report) -> Finish:
        """Draw images; return what another thread does of it: put their pixels into files, and return facts about them.

        On a GPU its work may only be queued when this returns.

        Raises:
            Cancelled, VivaceError: see `vivace.errors`.
        """
        session = self.session if request.task == "text" else self.editing.sessions[request.task]
        times = CallTimes(session.device)
        times.mark()
        if self.load_request.loras:
            self.loras.exchange(self.session, request.lora)
        times.mark()
        pixels = self._call(session, request, report, times)
        times.mark()
        notes = [note for prompt in request.prompts if (note := _unread(session.pipe, prompt))][:1]

        def finish() -> dict[str, Any]:
            arrays = pixels.wait()
            phases, steps = phases_of(times.seconds())
            images = self._keep(request, "image", arrays)
            if any(has_one_colour(array) for array in arrays):
                notes.append("all pixels of the image have one colour")
            memory = _memory(session.device)
            return {
                "images": images,
                "phases": phases,
                "steps": steps,
                "notes": notes,
                **self.energy.since_last(),
                **memory,
            }

        return finish

    def _call(self, session: Session, request: Draw, report: Report, times: CallTimes) -> Pixels:
        def on_step(step: int, latents: Any, height: int, width: int) -> None:
            times.mark()
            times.wait_for_last_but_one()
            fields: dict[str, Any] = {"step": step}
            if step in request.partials and self.projection is not None:
                images = [
                    self.projection.image(latents[number : number + 1], height, width)
                    for number in range(len(request.ids))
                ]
                fields["images"] = self._keep(request, f"partial-{step}", Pixels(images).wait())
            report("step", fields)

        arguments = _arguments(request)
        if returns_tensors(session.pipe, session.device):
            arguments["output_type"] = "pt"
        session.on_step = on_step
        session.defers_check = arguments.get("output_type") == "pt"
        try:
            output = session(**arguments)
        finally:
            session.on_step, session.defers_check = None, False
        if any(hidden_images(output)):
            raise Unsupported("the model's safety checker replaced the image; ask for another one")
        return Pixels.of(output.images, session.check)

    def _keep(self, request: Draw, name: str, arrays: list[NDArray[np.uint8]]) -> list[dict[str, Any]]:
        kept = []
        for job, array in zip(request.ids, arrays, strict=True):
            path = image_file(Path(self.load_request.folder), job, name)
            path.write_bytes(array.data)
            height, width = array.shape[:2]
            kept.append({"file": str(path), "width": width, "height": height})
        return kept


def keep_prompts_out_of_logs() -> None:
    """Let diffusers log errors only: its warnings quote the part of a prompt that a text encoder cuts off, of which the
    answer's notes tell. Users who set diffusers' own variable get its logs."""
    if _VERBOSITY not in os.environ:
        logging.getLogger("diffusers").setLevel(logging.ERROR)


def _unread(pipe: Any, prompt: str) -> str:
    """Return a note if a prompt is longer than every text encoder of a pipeline reads; else ""."""
    if len(prompt) < _SHORT:
        return ""
    tokenizers = [
        part for name, part in pipe.components.items() if name.startswith("tokenizer") and part is not None
    ]
    lengths = [(len(each(prompt).input_ids), int(each.model_max_length)) for each in tokenizers]
    if not lengths or any(length <= most for length, most in lengths):
        return ""
    length, most = max(lengths, key=lambda each: each[1])
    return f"the prompt has {length} tokens and the model reads {most}; the rest is cut off"


def _arguments(request: Draw) -> dict[str, Any]:
    import torch
    from PIL import Image

    pictures: dict[str, list[Any]] = {}
    for picture in request.pictures:
        pixels = Path(picture.file).read_bytes()
        image = Image.frombytes(picture.mode, (picture.width, picture.height), pixels)
        pictures.setdefault(picture.argument, []).append(image)
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds]
    is_single = len(request.ids) == 1
    return {
        "prompt": request.prompts[0] if is_single else list(request.prompts),
        "generator": generators[0] if is_single else generators,
        **{name: images[0] if len(images) == 1 else images for name, images in pictures.items()},
        **request.call,
    }


def _memory(device: str) -> dict[str, int]:
    import psutil
    import torch

    memory = {"rss_bytes": int(psutil.Process().memory_info().rss)}
    if device == "cuda":
        memory["gpu_bytes"] = int(torch.cuda.memory_reserved())
    return memory


def memory_of(device: str) -> int | None:
    import torch

    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(machine_bytes()) if device == "cpu" else None


def check_fits(
    name: str,
    recipe: Recipe,
    sizes: Sequence[tuple[int, int]],
    task: Task | None,
    num_bytes: int,
    place: str = "this GPU",
) -> None:
    """Raise Unsupported if a model with a recipe needs more memory than a device has, as `vivace plan` predicts.

    Predicting takes seconds, and is left out for a model of the catalogue that fits as it is published, even if all
    that it needs grew with the square of the pixels. What cannot be predicted is loaded.
    """
    from vivace.runtime.memory.fit import RESERVE_BYTES, fits
    from vivace.runtime.memory.remembered import footprints, predicted
    from vivace.runtime.memory.weightless import find_weightless

    width, height = max(sizes, key=lambda size: size[0] * size[1], default=(None, None))
    published = footprints().get(name.removeprefix("synthetic:"))
    larger = 1.0 if published is None else (width or 0) * (height or 0) / (published.width * published.height)
    if published is not None and fits(published, num_bytes / max(1.0, larger) ** 2):
        return
    if larger > 1:
        published = None  # it says nothing of larger images
    if published is not None and recipe.text == BASELINE:
        prediction = published
    else:
        try:
            prediction = predicted(find_weightless(name), recipe, height=height, width=width, task=task)
        except VivaceError:
            return
    if not fits(prediction, num_bytes):
        needed = (prediction.needed_bytes + RESERVE_BYTES) / _GB
        raise Unsupported(
            f"{name} with {recipe.text} needs {needed:.1f} GB at {prediction.width}x{prediction.height}, and {place} "
            f"has {num_bytes / _GB:.1f} GB; `vivace plan {name} --card {num_bytes / _GB:.0f}` says what fits"
        )
