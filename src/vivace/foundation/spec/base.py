"""The base class of stored data."""

from __future__ import annotations

import hashlib
import json
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer


class Spec(BaseModel):
    """Frozen data with a JSON round trip. Unknown fields are errors, so that a typo is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON (sorted keys, no spaces), as hex."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class SparseSpec(Spec):
    """Data without the fields named in `omits` where they have their default, so that keys of earlier versions hold."""

    omits: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_defaults(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = dump(self)
        for name in self.omits:
            if getattr(self, name) == type(self).model_fields[name].default:
                fields.pop(name, None)
        return fields
