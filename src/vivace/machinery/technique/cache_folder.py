"""The folder of results that vivace may reuse: scales and compiled code. It may be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path

from vivace.foundation.untrusted.files import user_path


def cache_folder() -> Path:
    """Return $VIVACE_CACHE, else `vivace` in the user's cache folder."""
    own = os.environ.get("VIVACE_CACHE")
    if own:
        return user_path(own)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vivace"
