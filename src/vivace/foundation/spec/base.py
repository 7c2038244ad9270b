"""The base class of stored data."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict


class Spec(BaseModel):
    """Frozen data with a JSON round trip. Unknown fields are errors, so that a typo is not ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def digest(self) -> str:
        """Return the sha256 of the canonical JSON (sorted keys, no spaces), as hex."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
