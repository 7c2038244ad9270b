"""The conditions of a measurement besides the trial: hardware, drivers, libraries, settings."""

from __future__ import annotations

from pydantic import field_validator

from vivace.foundation.spec.base import SparseSpec, Spec


class Place(Spec):
    """Where a trial was measured, if there were several places to choose from.

    Attributes:
        uuid: the GPU's; on a CPU a name that the pool of places gives.
        index: the GPU's number on its host; on a CPU the place's.
        host: its name, if there were several hosts.
    """

    uuid: str
    index: int | None = None
    host: str | None = None

    @property
    def name(self) -> str:
        """Name of the place, e.g. "GPU 1 (GPU-5f0c...) of node-a"."""
        number = "" if self.index is None else f" {self.index}"
        kind = f"GPU{number}" if self.uuid.startswith("GPU-") else f"place{number}"
        return f"{kind} ({self.uuid})" + (f" of {self.host}" if self.host else "")


class Environment(SparseSpec):
    """The machine and the software that a trial was measured with.

    It holds stable facts only, since it is part of a row's key. Load and clocks are in `Round.conditions`.

    Attributes:
        source_revision: the commit of vivace's sources, after a plus a hash of what has changed; None if unknown.
        device: "cpu" or "cuda".
        device_capability: the GPU's compute capability, such as "9.0"; None on a CPU.
        variables: environment variables that change measurements.
        place: which of several GPUs or hosts, so that their records have different keys and never mix; None if there
            was no choice.
    """

    omits = ("place",)

    vivace: str
    source_revision: str | None
    platform: str
    python: str
    device: str
    device_name: str
    device_capability: str | None
    driver: str | None
    cpu: str
    num_cores: int
    num_threads: int
    memory_bytes: int
    libraries: dict[str, str]
    variables: dict[str, str]
    place: Place | None = None

    def at(self, place: Place | None) -> Environment:
        """Return the same environment at a place, which then tells which GPUs its process sees."""
        variables = {name: v for name, v in self.variables.items() if name != "CUDA_VISIBLE_DEVICES"}
        return self.model_copy(update={"place": place, "variables": variables})

    @field_validator("driver")
    @classmethod
    def _driver_is_a_version(cls, value: str | None) -> str | None:
        # Early records from open kernel modules hold "for", a wrong word of the driver's version line.
        return value if value is not None and value[:1].isdigit() else None
