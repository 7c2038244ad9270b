"""A session that draws for a server: warmed at its sizes, with LoRAs by request, and partial images."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.safety import hidden_images
from vivace.serve.energy import EnergyMeter
from vivace.serve.messages import Draw, Load, image_file
from vivace.serve.partials import Projection, fit_projection

if TYPE_CHECKING:
    from vivace.runtime.session import Session

Report = Callable[[str, dict[str, Any]], None]
_TIMED_STEPS = 4
_SCALE_OF_NONE = 0.0
_DOWN = (".lora_down.weight", ".lora_A.weight", ".lora.down.weight")


@dataclass
class Drawing:
    """A session with what was measured of it.

    Attributes:
        speeds: seconds of a step and of the rest, by (width, height).
        projection: of latents to colours; None where the model's latents are of another layout.
    """

    session: Session
    load_request: Load
    multiple: int
    speeds: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    projection: Projection | None = None
    notes: list[str] = field(default_factory=list)
    energy: EnergyMeter = field(default_factory=EnergyMeter)

    @classmethod
    def load(cls, request: Load, report: Callable[[str], None]) -> Drawing:
        """Load the model, apply the recipe, and draw at each size.

        Raises:
            VivaceError: the model or the recipe does not work here.
        """
        import torch

        from vivace.benchmark.comparison import default_threads
        from vivace.measure.machine import check_works, choose_device
        from vivace.models.find import obtain

        report(f"loading {request.model}")
        device = choose_device(request.device)
        check_works(device)
        located = obtain(find_model(request.model))
        torch.set_num_threads(request.threads or default_threads(located))
        recipe = resolve(request.recipe)
        if request.loras:
            recipe = resolve(f"{recipe.text}+{_reserving(request.loras)}".removeprefix("baseline+"))
        session = open_session(located, recipe, device)
        multiple = located.entry.size_multiple if located.entry is not None else 8
        drawing = cls(session, request, multiple, notes=list(session.warnings))
        session.pipe.set_progress_bar_config(disable=True)
        if request.loras:
            session.set_lora(scale=_SCALE_OF_NONE)
        for width, height in request.sizes or (drawing.own_size,):
            report(f"warming {width}x{height}")
            drawing.warm(width, height)
        drawing.energy = EnergyMeter.of_this_process()
        return drawing

    @property
    def own_size(self) -> tuple[int, int]:
        defaults = self.session.defaults
        return int(defaults["width"]), int(defaults["height"])

    def warm(self, width: int, height: int) -> None:
        """Draw twice, so that later images of this size compile nothing, and keep how long the second one took."""
        import torch

        from vivace.errors import WorkloadError

        own = int(self.session.defaults["num_inference_steps"])
        ends: list[float] = []
        latents: list[Any] = []

        def on_step(step: int, tensor: Any, height: int, width: int) -> None:
            ends.append(time.perf_counter())
            latents[:] = [tensor]

        def draw(steps: int) -> Any:
            ends.clear()
            self.session.on_step = on_step
            try:
                return self.session(
                    "a photograph of a red apple",
                    height=height,
                    width=width,
                    num_inference_steps=steps,
                    generator=torch.Generator("cpu").manual_seed(0),
                )
            finally:
                self.session.on_step = None

        try:
            draw(min(own, _TIMED_STEPS))
            began = time.perf_counter()
            output = draw(min(own, _TIMED_STEPS))
        except WorkloadError:  # a sampler that cannot take so few steps
            draw(own)
            began = time.perf_counter()
            output = draw(own)
        image = output.images[0]
        total = time.perf_counter() - began
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else total
        self.speeds[width, height] = (step_s, max(0.0, total - step_s * len(ends)))
        if self.projection is None and latents and latents[0] is not None:
            self.projection = fit_projection(self.session.pipe, latents[0], image)

    def state(self) -> dict[str, Any]:
        """Return what the server needs to know, as plain data."""
        from vivace.families import family_of
        from vivace.runtime.calls import accepted_by
        from vivace.technique import component_of

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
            "size": [width, height],
            "multiple": self.multiple,
            "takes": sorted(takes),
            "guided_above": off if "negative_prompt" in takes else None,
            "speeds": [[*size, *speed] for size, speed in self.speeds.items()],
            "has_partials": self.projection is not None,
            "notes": self.notes,
        }

    def draw(self, request: Draw, report: Report) -> dict[str, Any]:
        """Draw an image, put its pixels into a file, and return what is known of it.

        Raises:
            Cancelled, VivaceError: see `vivace.errors`.
        """
        import torch

        exchanged = self._exchange(request.lora)
        began, ends, joules = time.perf_counter(), [], self.energy.read()

        def on_step(step: int, latents: Any, height: int, width: int) -> None:
            ends.append(time.perf_counter())
            fields: dict[str, Any] = {"step": step}
            if step in request.partials and self.projection is not None:
                fields |= self._keep(
                    request.id, f"partial-{step}", self.projection.image(latents, height, width)
                )
            report("step", fields)

        self.session.on_step = on_step
        try:
            output = self.session(
                request.prompt, generator=torch.Generator("cpu").manual_seed(request.seed), **request.call
            )
        finally:
            self.session.on_step = None
        image = output.images[0]
        finished = time.perf_counter()
        if any(hidden_images(output)):
            raise Unsupported("the model's safety checker replaced the image; ask for another one")
        step_s = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else 0.0
        text_s = max(0.0, ends[0] - began - step_s) if ends else 0.0
        return {
            **self._keep(request.id, "image", image),
            "phases": {
                "lora": exchanged,
                "text": text_s,
                "denoise": (ends[-1] - began - text_s) if ends else 0.0,
                "decode": finished - (ends[-1] if ends else began),
            },
            "steps": len(ends),
            **self.energy.since(joules),
            **_memory(self.session.device),
        }

    def _exchange(self, lora: tuple[str, float] | None) -> float:
        """Exchange the LoRA if it is another one; return the seconds."""
        if not self.load_request.loras:
            return 0.0
        began = time.perf_counter()
        if lora is None:
            self.session.set_lora(scale=_SCALE_OF_NONE)
        else:
            self.session.set_lora(lora[0], scale=lora[1])
        return time.perf_counter() - began

    def _keep(self, job: str, name: str, image: Any) -> dict[str, Any]:
        path = image_file(Path(self.load_request.folder), job, name)
        path.write_bytes(image.convert("RGB").tobytes())
        return {"file": str(path), "width": image.width, "height": image.height}


def _reserving(paths: Sequence[str]) -> str:
    """Return the technique that reserves every layer for the largest rank of these LoRAs."""
    from safetensors import safe_open

    rank = 0
    for path in paths:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(_DOWN)]  # noqa: SIM118 - it is no mapping
            rank = max([rank, *(min(file.get_slice(name).get_shape()[:2]) for name in names)])
    return f"lora({paths[0]!r}, hot=True, layers=all, max_rank={rank})"


def _memory(device: str) -> dict[str, int]:
    """Return the resident set of this process, and what it has allocated on the GPU."""
    import psutil
    import torch

    memory = {"rss_bytes": int(psutil.Process().memory_info().rss)}
    if device == "cuda":
        memory["gpu_bytes"] = int(torch.cuda.memory_reserved())
    return memory
