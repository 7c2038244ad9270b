"""Everything that a search lacks on this machine, before anything is downloaded, loaded or measured.

Nothing here imports torch. Requirements are lower bounds: a search is refused only if it cannot succeed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vivace.answers.formatting import clock, count, size
from vivace.architectures import CATALOGUE, family_of_pipeline
from vivace.architectures.entry import Embedded, Entry, Hub
from vivace.errors import UnknownModel, Unsupported, UnusableModel
from vivace.evidence.lint.model_limits import flops_of
from vivace.evidence.recorded import all_recorded
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.settings import CallSettings
from vivace.foundation.untrusted.files import user_path
from vivace.measure.surroundings import Surroundings, surroundings
from vivace.models.find import SYNTHETIC, find_model
from vivace.models.scorers import find_scorer, find_witness

_CORE_FLOPS = 200e9
"""FLOP per second and core in fp32: more than a core of any CPU reaches in a whole model."""
_LEAST_IMAGES = 4
"""Images of the shortest final: the baseline and a recipe, in two rounds."""
_FP32_OVER_HALF = 2


@dataclass(frozen=True)
class Lack:
    """A missing requirement. It `ends` everything, or is a download that `may_come` from a hub silent so far."""

    text: str
    ends: bool
    may_come: bool = False


def check_ready(
    model: str,
    device: str,
    minutes: float | None,
    request: CallSettings,
    scorer: str | None = "auto",
    witness: str | None = None,
    here: Surroundings | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Raise Unsupported, naming everything that is missing, for a search that cannot succeed here; else `tell` it."""
    needs = _Needs(model, device, request, here or surroundings())
    lacks = [*needs.gpu(minutes), *needs.memory(), *needs.download(), *needs.judges(scorer, witness)]
    if not any(lack.ends for lack in lacks if not lack.may_come):
        for lack in lacks:
            tell(lack.text)
        if not any(lack.may_come for lack in lacks) or needs.here.hub_answers_late():
            return
    raise needs.refusal("tuned", lacks)


def check_runs_here(model: str | None, device: str, here: Surroundings | None = None) -> None:
    """Refuse a model that cannot be loaded here before its files are asked for; None to check the device alone."""
    here = here or surroundings()
    if device not in ("auto", "cpu") and here.has_no_gpu:
        raise Unsupported(f"--device {device}: {here.why_no_gpu}; use --device cpu")
    name = (model or "").strip()
    entry = CATALOGUE.get(name.lower())
    is_here = entry is not None and not isinstance(entry.origin, Hub)
    if not name or is_here or name.lower().startswith(SYNTHETIC):
        return
    needs = _Needs(name, device, CallSettings(), here)
    lacks = [*(needs.memory() if needs.on_cpu else ()), *needs.download()]
    ending = [lack for lack in lacks if lack.ends]
    if ending and not (all(lack.may_come for lack in ending) and here.hub_answers_late()):
        raise needs.refusal("loaded", lacks)


class _Needs:
    """What a model needs, and what this machine lacks of it.

    Attributes:
        absent: the repositories of parts that are not on this machine; None if all are, or the model is unknown.
        download_bytes, memory_bytes, image_s: of its files, its memory here, and seconds of an image; None if unknown.
    """

    def __init__(self, model: str, device: str, request: CallSettings, here: Surroundings) -> None:
        self.name, self.device, self.here = model.strip(), device, here
        self.is_synthetic = self.name.lower().startswith(SYNTHETIC)
        self.entry = CATALOGUE.get(self.name.lower().removeprefix(SYNTHETIC))
        self.on_cpu = device == "cpu" or (device == "auto" and here.has_no_gpu)
        self.download_bytes: int | None = None
        self.memory_bytes: float | None = None
        self.image_s: float | None = None
        self.absent: str | None = None
        try:
            located = find_model(self.name, download=False)
        except Unsupported:
            origin = None if self.entry is None or self.is_synthetic else self.entry.origin
            self.absent = origin.repo if isinstance(origin, Hub) else self.name.partition("@")[0]
        except (UnknownModel, UnusableModel):
            pass
        else:
            repos = dict.fromkeys(download.repo for download in located.downloads)
            self.absent = " and ".join(repos) or None
            if located.weights and all(path.is_file() for path in located.weights):
                self.memory_bytes = float(sum(path.stat().st_size for path in located.weights))
        if self.entry is not None and isinstance(self.entry.origin, Hub):
            self._estimate(self.entry, self.entry.origin, request)

    def _estimate(self, entry: Entry, origin: Hub, request: CallSettings) -> None:
        self.download_bytes = origin.download_bytes
        if self.memory_bytes is None:
            self.memory_bytes = origin.download_bytes
        height, width = request.height or entry.height, request.width or entry.width
        records = all_recorded().get((entry.name, BASELINE, entry.height, entry.width), ())
        if records and self.on_cpu:
            self.memory_bytes = float(_FP32_OVER_HALF * max(figures.model_bytes for figures in records))
        elif records:
            is_full = height * width >= entry.height * entry.width
            peaks = [figures.peak_bytes if is_full else figures.model_bytes for figures in records]
            self.memory_bytes = float(min(peaks))
        if (work := flops_of(entry.name)) is not None:
            steps = request.num_inference_steps or entry.num_inference_steps
            share = min(1.0, height * width / work.pixels)
            self.image_s = work.step_flop * share * steps / (self.here.num_cores * _CORE_FLOPS)

    def gpu(self, minutes: float | None) -> Iterator[Lack]:
        here = self.here
        if self.device not in ("auto", "cpu") and here.has_no_gpu:
            yield Lack(f"GPU: --device {self.device}, and {here.why_no_gpu}", ends=True)
        elif self.on_cpu and self.image_s is not None:
            cores = count(here.num_cores, "CPU core")
            takes = f"an image takes at least {clock(math.ceil(self.image_s))} on {cores}"
            too_long = minutes is not None and _LEAST_IMAGES * self.image_s > 60 * minutes
            if self.device == "cpu":
                if too_long:
                    yield Lack(f"GPU: on the CPU {takes}", ends=False)
                return
            limit = ""
            if too_long:
                least = math.ceil(_LEAST_IMAGES * self.image_s / 60)
                limit = f", too long for a search of {minutes:g} minutes; give --minutes {least} or more"
            yield Lack(f"GPU: {here.why_no_gpu}; {takes}{limit}", ends=too_long)

    def memory(self) -> Iterator[Lack]:
        here, needed = self.here, self.memory_bytes
        if needed is None:
            return
        if self.on_cpu and needed > here.memory_bytes:
            has = f"this machine has {size(here.memory_bytes)}"
            yield Lack(f"memory: the model takes at least {size(needed)} on a CPU, and {has}", ends=True)
        elif not self.on_cpu and here.gpu_bytes is not None and needed > here.gpu_bytes:
            takes = f"takes {size(needed)} on a GPU, and the {here.gpu} has {size(here.gpu_bytes)}"
            yield Lack(f"memory: the baseline, which recipes are compared with, {takes}", ends=True)

    def download(self) -> Iterator[Lack]:
        here, absent = self.here, self.absent
        if absent is None:
            return
        amount = "" if self.download_bytes is None else f", {size(self.download_bytes)},"
        part = "" if here.is_hub_empty(absent) else "wholly "
        missing, why = f"download: {absent}{amount} is not {part}on this machine, and", here.why_no_hub()
        if why is not None:
            yield Lack(f"{missing} {why}", True, here.is_hub_silent())
        else:
            yield Lack(f"{missing} is downloaded first", ends=False)
        free = _free(here.hub_cache)
        if self.download_bytes is not None and self.download_bytes > free:
            instead = "free disk space, or set HF_HOME to a folder on a larger disk"
            text = f"disk space: {size(free)} are free in {here.hub_cache}; {instead}"
            yield Lack(text, ends=here.is_hub_empty(absent))
        if self.entry is not None and self.entry.gated and not here.has_token:
            yield Lack(
                f"access: {absent} is gated: ask for access at {here.hub}/{absent.split(' and ')[0]}, then log in "
                "with `hf auth login` or set HF_TOKEN",
                ends=True,
            )

    def judges(self, scorer: str | None, witness: str | None) -> Iterator[Lack]:
        """Yield the models that judge images and that can be neither located nor downloaded."""
        options = [(scorer, "--scorer", find_scorer)] if scorer not in (None, "auto") else []
        options += [(witness, "--witness", find_witness)] if witness is not None else []
        for name, flag, find in options if not self.is_synthetic else ():
            with suppress(UnknownModel, UnusableModel):
                try:
                    find(str(name), download=False)
                except Unsupported:
                    if (why := self.here.why_no_hub()) is not None:
                        text = f"download: {flag} {name} is not on this machine, and {why}"
                        yield Lack(text, True, self.here.is_hub_silent())

    def refusal(self, what: str, lacks: Sequence[Lack]) -> Unsupported:
        """Return the error that names what is missing, and what works here instead."""
        family = None if self.entry is None else family_of_pipeline(self.entry.pipeline)
        embedded = [each for each in CATALOGUE.values() if isinstance(each.origin, Embedded)]
        alike = [e for e in embedded if family is None or family.is_transformer == _is_transformer(e)]
        instead = [f"`vivace tune {alike[0].name}` runs on any machine"]
        if self.entry is not None:
            name = self.entry.name
            instead.append(f"`vivace plan {name}` predicts the memory of recipes without the model")
            instead.append(f"`vivace recommend {name}` names the fastest known recipe of a GPU")
        reasons = "\n".join(f"  - {lack.text}" for lack in lacks)
        return Unsupported(f"{self.name} cannot be {what} here:\n{reasons}\nHere {'; '.join(instead)}.")


def _free(folder: Path) -> int:
    folder = user_path(str(folder)).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _is_transformer(entry: Entry) -> bool:
    family = family_of_pipeline(entry.pipeline)
    return family is not None and family.is_transformer
