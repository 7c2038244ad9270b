"""A worker with one more technique: `fault(KIND)`, which breaks its own trial. For tests of isolation."""

import os
import signal
import sys
import time
from typing import Any, ClassVar, Literal

from vivace.machinery.technique import Effect, Stage, Target, Technique, TechniqueFacts, knob
from vivace.techniques import TECHNIQUES

COMMAND = (sys.executable, __file__)


class Fault(Technique):
    name: ClassVar[str] = "fault"
    summary: ClassVar[str] = "ruins the trial"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(stage=Stage.SWAP, owns="fate", same_picture=True)

    kind: Literal[
        "black",
        "segfault",
        "hang",
        "late_hang",
        "raise",
        "oom",
        "huge",
        "cuda_oom",
        "exit",
        "kill",
        "garbage",
        "stubborn",
    ] = knob()

    def unsupported(self, target: Target) -> str | None:
        return None

    def apply(self, target: Target) -> Effect:
        if self.kind == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "hang":
            time.sleep(3600)
        elif self.kind == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        elif self.kind == "raise":
            raise RuntimeError("the flux capacitor is empty\nsecond line")
        elif self.kind == "oom":
            raise MemoryError
        elif self.kind == "huge":
            import torch

            torch.empty(2**60, dtype=torch.uint8)
        elif self.kind == "cuda_oom":
            import torch

            torch.empty(2**50, dtype=torch.uint8, device="cuda")
        elif self.kind == "exit":
            os._exit(0)
        elif self.kind == "black":
            decode = target.pipe.vae.decode
            # What an overflowing fp16 VAE returns: NaN everywhere.
            target.pipe.vae.decode = lambda *args, **kwargs: (decode(*args, **kwargs)[0] * float("nan"),)
        elif self.kind == "garbage":
            print("}{ not JSON", flush=True)  # libraries print to standard output
        return Effect(changed={"fault": self.kind}, step_end=_hang if self.kind == "late_hang" else None)


def _hang(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    time.sleep(3600)
    return {}


def set_up() -> None:
    """Add the technique to this process."""
    TECHNIQUES["fault"] = Fault


if __name__ == "__main__":
    set_up()
    from vivace.benchmark.rounds.worker import main

    main()
