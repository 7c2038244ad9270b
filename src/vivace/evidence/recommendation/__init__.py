"""Recommend a recipe from existing records."""

from vivace.evidence.recommendation.advise import recommend
from vivace.evidence.recommendation.recommendation import Criteria, Goal, Recommendation

__all__ = ["Criteria", "Goal", "Recommendation", "recommend"]
