"""Which recipe to use, from the records at hand."""

from vivace.advice.advise import recommend
from vivace.advice.answer import Recommendation
from vivace.advice.wanted import Goal, Wanted

__all__ = ["Goal", "Recommendation", "Wanted", "recommend"]
