"""Which recipe to use, from the records at hand."""

from vivace.recommendation.advise import recommend
from vivace.recommendation.criteria import Criteria, Goal
from vivace.recommendation.recommendation import Recommendation

__all__ = ["Criteria", "Goal", "Recommendation", "recommend"]
