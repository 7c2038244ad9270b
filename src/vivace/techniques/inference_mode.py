"""The whole call under `torch.inference_mode` instead of `torch.no_grad`.

Why: PyTorch then keeps no version counters and no records of views, which costs a little for every operation on the
    CPU's side. It shows where the CPU cannot keep up with the GPU: small models, small pictures, eager execution.
Costs: nothing in the picture. Tensors that the call returns (`output_type="pt"` or `"latent"`) can never take part in
    autograd; clone them if they should.
Needs: nothing. `compile` compiles again when the mode changes, so call the pipeline through the session always.
Source: PyTorch, "Inference mode" in the autograd notes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from vivace.contract import Effect, Stage, Target, Technique
from vivace.contract.script import Script


class InferenceMode(Technique):
    name: ClassVar[str] = "inference_mode"
    summary: ClassVar[str] = "the call under torch.inference_mode"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "autograd mode"
    same_picture: ClassVar[bool] = True
    of_the_process: ClassVar[bool] = True

    def unsupported(self, target: Target) -> str | None:
        return None

    def apply(self, target: Target) -> Effect:
        import torch

        seen = {"denoiser_calls": 0, "denoiser_calls_in_inference_mode": 0}

        def look(module: Any, args: Any) -> None:
            seen["denoiser_calls"] += 1
            seen["denoiser_calls_in_inference_mode"] += torch.is_inference_mode_enabled()

        target.module("denoiser").register_forward_pre_hook(look)

        @contextmanager
        def inference() -> Iterator[None]:
            with torch.inference_mode():
                yield

        def refuted(_: dict[str, Any]) -> str | None:
            missed = seen["denoiser_calls"] - seen["denoiser_calls_in_inference_mode"]
            if missed:
                return (
                    f"{missed} of the denoiser's calls ran outside of it: call the session, not its pipeline"
                )
            return None

        return Effect(
            changed={"autograd": "inference mode"},
            around=inference,
            evidence=lambda: dict(seen),
            refuted=refuted,
        )

    def script(self, target: Target) -> Script:
        return Script(imports=("torch",), around="torch.inference_mode()")
