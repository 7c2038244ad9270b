"""Which recipe to use, from the records at hand."""

from vivace.recommendation.advise import recommend
from vivace.recommendation.answer import Recommendation
from vivace.recommendation.criteria import Criteria, Goal

__all__ = ["Criteria", "Goal", "Recommendation", "recommend"]
