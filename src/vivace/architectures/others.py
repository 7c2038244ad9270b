"""Models that vivace knows by name alone: what it says of their files, and that a text means one of them."""

from __future__ import annotations

OTHER_NAMES = (
    r"\bsd(?![a-z])|xl\b|diffusion|qwen|pixart|hunyuan|lumina|kolors|klein|chroma|hidream|pony|playground|kandinsky"
    r"|\bwan\b"
)
"""Names in tables of others, besides those of the families: a regular expression."""
