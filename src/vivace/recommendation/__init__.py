"""Recommend a recipe from existing records."""

from vivace.recommendation.advise import recommend
from vivace.recommendation.criteria import Criteria, Goal
from vivace.recommendation.recommendation import Recommendation

__all__ = ["Criteria", "Goal", "Recommendation", "recommend"]
