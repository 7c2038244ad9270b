"""What a measurement depends on besides the trial: hardware, drivers, libraries, settings."""

from __future__ import annotations

from pydantic import field_validator

from vivace.spec.base import Spec


class Environment(Spec):
    """The machine and the software that a trial was measured with.

    It holds stable facts only, since it is part of a row's key. Load and clocks are in `Round.conditions`.

    Attributes:
        vivace: vivace's version.
        source_revision: of vivace's sources, None if unknown.
        device: "cpu" or "cuda".
        device_capability: the GPU's compute capability, such as "9.0"; None on a CPU.
        libraries: versions by name.
        variables: environment variables that change measurements.
    """

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

    @field_validator("driver")
    @classmethod
    def _driver_is_a_version(cls, value: str | None) -> str | None:
        # Early records from open kernel modules hold "for", a wrong word of the driver's version line.
        return value if value is not None and value[:1].isdigit() else None
