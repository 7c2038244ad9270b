"""Statistics of records, as pure functions, and what a comparison and a profile answer. Nothing here imports torch, so
a report can be made on a laptop."""

from vivace.report.fidelity import Fidelity
from vivace.report.latency import Latency
from vivace.report.quality_gate import Judgement
from vivace.report.rows import Row, rows_of
from vivace.report.summary import summary

__all__ = ["Fidelity", "Judgement", "Latency", "Row", "rows_of", "summary"]
