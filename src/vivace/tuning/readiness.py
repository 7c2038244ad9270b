"""Everything that a search lacks on this machine, before anything is downloaded, loaded or measured.

Nothing here imports torch. Requirements are lower bounds: a search is refused only if it cannot succeed.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vivace.answers.formatting import clock, size
from vivace.architectures import CATALOGUE, family_of_pipeline
from vivace.architectures.entry import Embedded, Entry, Hub
from vivace.errors import UnknownModel, Unsupported, UnusableModel
from vivace.evidence.lint.model_limits import flops_of
from vivace.evidence.recorded import all_recorded
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.settings import CallSettings
from vivace.foundation.untrusted.files import user_path
from vivace.measure.surroundings import Surroundings, surroundings
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.models.scorers import find_scorer, find_witness

_CORE_FLOPS = 200e9
"""FLOP per second and core in fp32: more than a core of any CPU reaches in a whole model."""
_LEAST_IMAGES = 4
"""Images of the shortest final: the baseline and a recipe, in two rounds."""
_FP32_OVER_HALF = 2


@dataclass(frozen=True)
class Lack:
    """A missing requirement.

    Attributes:
        ends: whether no search can succeed without it.
        may_come: whether it is a download from a hub that is silent so far.
    """

    text: str
    ends: bool
    may_come: bool = False


@dataclass(frozen=True)
class _Needs:
    """Requirements of a model: bytes of its files and of its memory here, and seconds of an image; None if unknown."""

    download_bytes: int | None
    memory_bytes: float | None
    image_s: float | None


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
    """Refuse a search that cannot succeed here, naming everything that is missing.

    Args:
        minutes: of the search; None for no limit.
        here: this machine.
        tell: called with each missing part where the search goes on.

    Raises:
        Unsupported: something is missing without which no search succeeds.
    """
    here = here or surroundings()
    name = model.strip()
    entry = CATALOGUE.get(name.lower().removeprefix(SYNTHETIC))
    located, absent = _located(name)
    on_cpu = device == "cpu" or (device == "auto" and here.has_no_gpu)
    needs = _needs(entry, located, request, here, on_cpu=on_cpu)
    lacks = [
        *_gpu(needs, device, minutes, here, on_cpu=on_cpu),
        *_memory(needs, here, on_cpu=on_cpu),
        *_download(needs, entry, absent, here),
        *(() if name.lower().startswith(SYNTHETIC) else _judges(scorer, witness, here)),
    ]
    if not any(lack.ends for lack in lacks if not lack.may_come):
        for lack in lacks:
            tell(lack.text)
        if not any(lack.may_come for lack in lacks) or here.hub_answers_late():
            return
    reasons = "\n".join(f"  - {lack.text}" for lack in lacks)
    raise Unsupported(f"{name} cannot be tuned here:\n{reasons}\n{_instead(entry)}")


def check_runs_here(model: str | None, device: str, here: Surroundings | None = None) -> None:
    """Refuse to load a model that cannot be loaded here, before its files are asked for.

    Args:
        model: None to check the device alone.

    Raises:
        Unsupported: there is no such device; the memory is too small; files cannot be downloaded.
    """
    here = here or surroundings()
    if device not in ("auto", "cpu") and here.has_no_gpu:
        raise Unsupported(f"--device {device}: {here.why_no_gpu}; use --device cpu")
    name = (model or "").strip()
    entry = CATALOGUE.get(name.lower())
    if not name or (entry is not None and not isinstance(entry.origin, Hub)):
        return
    located, absent = _located(name)
    on_cpu = device == "cpu" or (device == "auto" and here.has_no_gpu)
    needs = _needs(entry, located, CallSettings(), here, on_cpu=on_cpu)
    lacks = [*(_memory(needs, here, on_cpu=True) if on_cpu else ()), *_download(needs, entry, absent, here)]
    if any(lack.ends for lack in lacks) and not (
        all(lack.may_come for lack in lacks if lack.ends) and here.hub_answers_late()
    ):
        reasons = "\n".join(f"  - {lack.text}" for lack in lacks)
        raise Unsupported(f"{name} cannot be loaded here:\n{reasons}\n{_instead(entry)}")


def _located(name: str) -> tuple[LocatedModel | None, str | None]:
    """Return the model's parts on this machine, and the repositories of the others; "" if they are unknown.

    An unknown model name is reported where it is looked up.
    """
    try:
        located = find_model(name, download=False)
    except Unsupported:
        entry = CATALOGUE.get(name.lower())
        origin = None if entry is None else entry.origin
        return None, origin.repo if isinstance(origin, Hub) else name.partition("@")[0]
    except (UnknownModel, UnusableModel):
        return None, None
    return located, " and ".join(dict.fromkeys(download.repo for download in located.downloads)) or None


def _needs(
    entry: Entry | None,
    located: LocatedModel | None,
    request: CallSettings,
    here: Surroundings,
    *,
    on_cpu: bool,
) -> _Needs:
    needs = _Needs(None, None, None)
    if located is not None and located.weights and all(path.is_file() for path in located.weights):
        needs = replace(needs, memory_bytes=float(sum(path.stat().st_size for path in located.weights)))
    if entry is None or not isinstance(entry.origin, Hub):
        return needs
    height, width = request.height or entry.height, request.width or entry.width
    records = all_recorded().get((entry.name, BASELINE, entry.height, entry.width), ())
    memory: float | None = entry.origin.download_bytes if needs.memory_bytes is None else needs.memory_bytes
    if records and on_cpu:
        memory = float(_FP32_OVER_HALF * max(figures.model_bytes for figures in records))
    elif records:
        is_full = height * width >= entry.height * entry.width
        memory = float(min(figures.peak_bytes if is_full else figures.model_bytes for figures in records))
    work = flops_of(entry.name)
    steps = request.num_inference_steps or entry.num_inference_steps
    seconds = None
    if work is not None:
        share = min(1.0, height * width / work.pixels)
        seconds = work.step_flop * share * steps / (here.num_cores * _CORE_FLOPS)
    return _Needs(entry.origin.download_bytes, memory, seconds)


def _gpu(
    needs: _Needs, device: str, minutes: float | None, here: Surroundings, *, on_cpu: bool
) -> Iterator[Lack]:
    if device not in ("auto", "cpu") and here.has_no_gpu:
        yield Lack(f"GPU: --device {device}, and {here.why_no_gpu}", ends=True)
        return
    if not on_cpu or needs.image_s is None:
        return
    cores = f"{here.num_cores} CPU core{'' if here.num_cores == 1 else 's'}"
    takes = f"an image takes at least {clock(math.ceil(needs.image_s))} on {cores}"
    too_long = minutes is not None and _LEAST_IMAGES * needs.image_s > 60 * minutes
    if device == "cpu":
        if too_long:
            yield Lack(f"GPU: on the CPU {takes}", ends=False)
        return
    least = math.ceil(_LEAST_IMAGES * needs.image_s / 60)
    limit = (
        f", too long for a search of {minutes:g} minutes; give --minutes {least} or more" if too_long else ""
    )
    yield Lack(f"GPU: {here.why_no_gpu}; {takes}{limit}", ends=too_long)


def _memory(needs: _Needs, here: Surroundings, *, on_cpu: bool) -> Iterator[Lack]:
    if needs.memory_bytes is None:
        return
    if on_cpu:
        if needs.memory_bytes > here.memory_bytes:
            yield Lack(
                f"memory: the model takes at least {size(needs.memory_bytes)} on a CPU, and this machine has "
                f"{size(here.memory_bytes)}",
                ends=True,
            )
    elif here.gpu_bytes is not None and needs.memory_bytes > here.gpu_bytes:
        yield Lack(
            f"memory: the baseline, which recipes are compared with, takes {size(needs.memory_bytes)} on a GPU, and "
            f"the {here.gpu} has {size(here.gpu_bytes)}",
            ends=True,
        )


def _download(needs: _Needs, entry: Entry | None, absent: str | None, here: Surroundings) -> Iterator[Lack]:
    if absent is None:
        return
    amount = "" if needs.download_bytes is None else f", {size(needs.download_bytes)},"
    part = "" if here.is_hub_empty(absent) else "wholly "
    why = here.why_no_hub()
    if why is not None:
        yield Lack(
            f"download: {absent}{amount} is not {part}on this machine, and {why}", True, here.is_hub_silent()
        )
    else:
        yield Lack(
            f"download: {absent}{amount} is not {part}on this machine, and is downloaded first", ends=False
        )
    if needs.download_bytes is not None and needs.download_bytes > _free(here.hub_cache):
        free = size(_free(here.hub_cache))
        yield Lack(
            f"disk space: {free} are free in {here.hub_cache}; free disk space, or set HF_HOME to a folder on a larger "
            "disk",
            ends=here.is_hub_empty(absent),
        )
    if entry is not None and entry.gated and not here.has_token:
        yield Lack(
            f"access: {absent} is gated: ask for access at {here.hub}/{absent.split(' and ')[0]}, then log in with "
            "`hf auth login` or set HF_TOKEN",
            ends=True,
        )


def _judges(scorer: str | None, witness: str | None, here: Surroundings) -> Iterator[Lack]:
    """Yield the models that judge images and that can be neither located nor downloaded."""
    options = [(scorer, "--scorer", find_scorer)] if scorer not in (None, "auto") else []
    options += [(witness, "--witness", find_witness)] if witness is not None else []
    for name, flag, find in options:
        with suppress(UnknownModel, UnusableModel):
            try:
                find(str(name), download=False)
            except Unsupported:
                if (why := here.why_no_hub()) is not None:
                    text = f"download: {flag} {name} is not on this machine, and {why}"
                    yield Lack(text, True, here.is_hub_silent())


def _free(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist."""
    folder = user_path(str(folder)).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _instead(entry: Entry | None) -> str:
    """Describe the alternatives that work here."""
    family = None if entry is None else family_of_pipeline(entry.pipeline)
    tiny = next(
        each.name
        for each in CATALOGUE.values()
        if isinstance(each.origin, Embedded)
        and (family is None or family.is_transformer == _is_transformer(each))
    )
    parts = [f"`vivace tune {tiny}` runs on any machine"]
    if entry is not None:
        parts.append(f"`vivace plan {entry.name}` predicts the memory of recipes without the model")
        parts.append(f"`vivace recommend {entry.name}` names the fastest known recipe of a GPU")
    return f"Here {'; '.join(parts)}."


def _is_transformer(entry: Entry) -> bool:
    family = family_of_pipeline(entry.pipeline)
    return family is not None and family.is_transformer
