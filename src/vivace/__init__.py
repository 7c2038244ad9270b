"""vivace: find, prove and run the fastest recipe for a text-to-image model on your GPU.

In Python:

    draw = vivace.load("tiny-sd", "tiny_vae+steps(20)")
    draw("a red circle above a blue square").images[0].save("circle.png")

    draw = vivace.apply(pipe, "bf16+cfg_cutoff(0.4)")     # any diffusers pipeline that you already have
    run = vivace.bench("tiny-sd", ["baseline", "tiny_vae"])
    print(run)
    print(vivace.prove("tiny-sd:baseline", "tiny-sd:tiny_vae"))

Importing this imports no torch.
"""

from __future__ import annotations

import os
import sys

is_command = os.path.basename("".join(sys.orig_argv[-len(sys.argv) :][:1])) in (
    "vivace",
    "-mvivace",
    "vivace.exe",
)
"""Whether this process was started as the command, not by another program that imports vivace."""
if is_command:
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the command begins there is nothing to clean up, and a traceback of imports says nothing.
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

import importlib  # noqa: E402 - an interrupt is heard first
from typing import TYPE_CHECKING, Any  # noqa: E402

if TYPE_CHECKING:
    from vivace.benchmark import Paired, Profiled, Run, Study, Timing, bench, compare, profile
    from vivace.entry_points import apply, load
    from vivace.errors import VivaceError
    from vivace.evidence.recommendation import Recommendation, recommend
    from vivace.evidence.studies import StudyFile, StudyRun, study
    from vivace.foundation.spec.record import Record
    from vivace.proofs.prover import prove
    from vivace.proofs.verdicts.proof import Proof
    from vivace.recipes import Recipe
    from vivace.runtime.session import Session
    from vivace.tuning import Tuned, tune

__version__ = "0.1.0"
__all__ = [
    "Paired",
    "Profiled",
    "Proof",
    "Recipe",
    "Recommendation",
    "Record",
    "Run",
    "Session",
    "Study",
    "StudyFile",
    "StudyRun",
    "Timing",
    "Tuned",
    "VivaceError",
    "__version__",
    "apply",
    "bench",
    "compare",
    "load",
    "profile",
    "prove",
    "recommend",
    "study",
    "tune",
]


# Where each public name is defined. A module is imported when its name is first used, so that `import vivace` costs
# nothing, and `vivace.VivaceError` no more than `vivace.errors`.
_MODULES = {
    "Paired": "benchmark.pairs",
    "Profiled": "benchmark.profiles",
    "Proof": "proofs.verdicts.proof",
    "Recipe": "recipes.recipe",
    "Recommendation": "evidence.recommendation.recommendation",
    "Record": "foundation.spec.record",
    "Run": "benchmark.run",
    "Session": "runtime.session",
    "Study": "foundation.spec.study",
    "StudyFile": "evidence.studies.study_file",
    "StudyRun": "evidence.studies.runs",
    "Timing": "foundation.spec.timing",
    "Tuned": "tuning.answer",
    "VivaceError": "errors",
    "apply": "entry_points",
    "bench": "benchmark.studies",
    "compare": "benchmark.pairs",
    "load": "entry_points",
    "profile": "benchmark.profiles",
    "prove": "proofs.prover",
    "recommend": "evidence.recommendation.advise",
    "study": "evidence.studies.runs",
    "tune": "tuning.tuner",
}


# Those that take minutes and show their progress.
_SHOWN = ("bench", "compare", "prove", "study", "tune")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'vivace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vivace.{_MODULES[name]}"), name)
    if isinstance(value, type):
        return value
    from vivace.foundation.spec.arguments import check_arguments

    if name not in _SHOWN:
        return check_arguments(value)
    from vivace.cli.display.progress_display import with_progress

    return with_progress(check_arguments(value))


def __dir__() -> list[str]:
    return sorted(__all__)
