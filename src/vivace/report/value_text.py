"""A recipe whose line may end between its parts, for pages."""

from __future__ import annotations

import re

from markupsafe import Markup

_BREAK_POINT = re.compile(r"(?<=\+)(?=[A-Za-z])|(?<=[^\s])(?=@)")


def breakable(text: str) -> Markup:
    """Allow line breaks between the parts of a recipe. `join` escapes the parts."""
    return Markup("<wbr>").join(_BREAK_POINT.split(text))
