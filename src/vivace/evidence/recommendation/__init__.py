"""Recommend a recipe from existing records."""

from vivace.evidence.recommendation.advise import recommend
from vivace.evidence.recommendation.criteria import Criteria, Goal
from vivace.evidence.recommendation.recommendation import Recommendation

__all__ = ["Criteria", "Goal", "Recommendation", "recommend"]
