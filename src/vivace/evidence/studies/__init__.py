"""Studies as files: models, recipes, published numbers and conclusions in one TOML file that `vivace study` runs."""

from vivace.evidence.studies.runs import StudyRun, study
from vivace.evidence.studies.study_file import StudyFile, published_studies, read_study

__all__ = ["StudyFile", "StudyRun", "published_studies", "read_study", "study"]
