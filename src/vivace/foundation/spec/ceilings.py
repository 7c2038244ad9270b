"""The highest rates of a device in single operations, and the work of a recipe to compare with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment

Operation = Literal["gemm", "attention", "copy", "host_to_device"]


class Ceiling(Spec):
    """The highest measured rate of an operation.

    Attributes:
        precision: "fp32", "tf32", "bf16", "fp16", "fp8" or "int8"; "" for copies.
        case: the shape, and for attention the kernel, that reached it.
        per_s: FLOP/s of GEMM and attention; bytes/s of copies, on the device read and written bytes together.
    """

    operation: Operation
    precision: str = ""
    case: str
    per_s: float = Field(gt=0)

    @property
    def name(self) -> str:
        return f"{self.operation} {self.precision}".strip()


class CeilingsIdentity(Spec):
    """The device, driver and PyTorch of ceilings. On a GPU the number of CPU threads does not matter."""

    device: str
    device_name: str
    driver: str | None
    torch: str
    threads: int | None


class Ceilings(CeilingsIdentity):
    """The ceilings of one device with one driver and one PyTorch.

    Attributes:
        missing: why an operation has no ceiling, by its name, e.g. {"gemm fp8": "..."}.
    """

    measured_at: str
    seconds: float
    ceilings: tuple[Ceiling, ...]
    missing: Mapping[str, str] = Field(default_factory=dict)

    def per_s(self, operation: Operation, precision: str = "") -> float | None:
        """Return the highest rate of an operation; None if it was not measured."""
        rates = [c.per_s for c in self.ceilings if (c.operation, c.precision) == (operation, precision)]
        return max(rates, default=None)

    @property
    def identity(self) -> CeilingsIdentity:
        return CeilingsIdentity(**{name: getattr(self, name) for name in CeilingsIdentity.model_fields})


def identity_of(environment: Environment) -> CeilingsIdentity:
    """Return the identity of the ceilings of an environment."""
    return CeilingsIdentity(
        device=environment.device,
        device_name=environment.device_name,
        driver=environment.driver,
        torch=environment.libraries.get("torch", ""),
        threads=environment.num_threads if environment.device == "cpu" else None,
    )


class ComponentWork(Spec):
    """The operations of one component in a call of the pipeline, all its calls together.

    Attributes:
        component: "text_encoder", "text_encoder_2", "text_encoder_3", "denoiser", "vae" (its decoder) or "vae_encoder".
        computed: calls that compute all of it, and so read all of its weights; the others are hits of a step cache.
        gemm_flop, conv_flop, attention_flop: floating-point operations; a multiply-add is two.
        gemm, conv, attention: their precisions, as in `Ceiling`.
    """

    component: str
    calls: int = Field(ge=0)
    computed: int = Field(ge=0)
    gemm_flop: int = Field(ge=0)
    conv_flop: int = Field(ge=0)
    attention_flop: int = Field(ge=0)
    gemm: str
    conv: str
    attention: str
    weights_bytes: int = Field(ge=0)


class Work(Spec):
    """The operations of a recipe's call, counted on tensors without values."""

    components: tuple[ComponentWork, ...] = ()
    reason: str | None = None
