"""What a measurement depends on besides the trial: hardware, drivers, libraries, settings."""

from __future__ import annotations

from pydantic import field_validator

from vivace.spec.base import Spec


class Environment(Spec):
    """Stable facts only, since the environment is part of a row's key; load and clocks are in the Round."""

    vivace: str
    source_revision: str | None
    platform: str
    python: str
    device: str  # "cpu" or "cuda"
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
        # The first records from open kernel modules hold another word of their version line: "for".
        return value if value is not None and value[:1].isdigit() else None
