"""PEFT's configuration of an adapter: alpha, ranks and how they scale. It is beside the file or in its header.

Source: peft, LoraConfig, LoHaConfig, LoKrConfig; diffusers, `lora_adapter_metadata`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.foundation.untrusted.files import read_object
from vivace.foundation.untrusted.reading import reading

CONFIG = "adapter_config.json"
_KINDS = ("LORA", "LOHA", "LOKR")
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the initial matrices from the model's weights."""


@dataclass(frozen=True)
class PeftSettings:
    """Settings with which one adapter was made.

    Attributes:
        where: what it was read from, for messages.
        values: PEFT's names and values.
        is_beside: whether it is another file, which may not belong to this one.
    """

    where: str
    values: Mapping[str, Any]
    is_beside: bool = False

    def problem(self) -> str | None:
        """Return why these settings cannot be applied to weights; None if they can."""
        kind = str(self.values.get("peft_type", "LORA")).upper()
        if kind not in _KINDS:
            return f"{self.where} says that it is {kind[:40]}; vivace adds {', '.join(_KINDS)}"
        if self.values.get("use_dora"):
            return f"{self.where} says use_dora: it is DoRA, which rescales the weights after adding"
        start = str(self.values.get("init_lora_weights", "")).lower()
        if start.startswith(_CHANGES_MODEL):
            return (
                f"{self.where} says init_lora_weights={start[:40]!r}, which takes a part out of the model's weights; "
                "convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        if self.values.get("layer_replication"):
            return f"{self.where} says layer_replication: it is for a model with repeated layers"
        return None

    def scale(self, names: tuple[str, ...], rank: int) -> float | None:
        """Return alpha / rank of a layer, or None where the settings have no alpha.

        Args:
            names: the layer's, as the file and as the model have it.

        Raises:
            ValueError: a number is none, or the rank is another.
        """
        stated = _patterned(self.values.get("rank_pattern"), names, self.values.get("r"))
        if (
            self.is_beside
            and stated is not None
            and stated != rank
            and self.values.get("peft_type", "LORA") == "LORA"
        ):
            raise ValueError(f"says rank {stated:g} for {names[-1]}, which has rank {rank}")
        alpha = _patterned(
            self.values.get("alpha_pattern"), names, self.values.get("lora_alpha", self.values.get("alpha"))
        )
        by = rank if stated is None else stated
        if self.values.get("use_rslora"):
            return (by if alpha is None else alpha) / math.sqrt(by)
        return None if alpha is None else alpha / by


def read_settings(config: Path) -> PeftSettings:
    """Read the json beside an adapter.

    Raises:
        UnusableModel: it is no json with an object.
    """
    with reading(config, advice="give the adapter as PEFT saved it"):
        values = read_object(config)
    return PeftSettings(config.name, values, is_beside=True)


def settings_of_header(metadata: Any, attribute: str) -> PeftSettings | None:
    """Return the settings that diffusers wrote into a file's header for one component; None if there are none."""
    start = f"{attribute}."
    values = {
        key.removeprefix(start): value
        for key, value in (metadata.items() if isinstance(metadata, dict) else ())
        if key.startswith(start)
    }
    return PeftSettings("its header", values) if values else None


def _patterned(patterns: Any, names: tuple[str, ...], default: Any) -> float | None:
    """Return PEFT's value for a layer: that of the first pattern that its name ends with, else the default."""
    value = default
    if isinstance(patterns, dict):
        for pattern, own in patterns.items():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                value = own
                break
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"has {value!r} where a number is expected")
    return number
