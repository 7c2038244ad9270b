"""The smallest difference that a comparison can detect, stated before it starts."""

from __future__ import annotations


def able_to_tell(rounds: int) -> str:
    """Describe the smallest difference that this many rounds can detect."""
    from vivace.foundation.stats import DEFAULT_SPREAD, detectable, rounds_for_same

    plural = "s" if rounds > 1 else ""
    text = (
        f"with {rounds} round{plural} this can tell differences of {100 * detectable(rounds):.0f} % or more"
    )
    for margin in (0.01, 0.03):
        needed = rounds_for_same(margin)
        if needed is not None and needed > rounds:
            text += f"; `same` within {margin:.0%} takes about {needed} rounds"
    spread = f"if equal processes differ by {DEFAULT_SPREAD.sd:.0%}"
    return f"{text} ({spread}; --until goes on until each recipe has an answer)"
