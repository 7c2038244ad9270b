"""Reports: pure functions of Records. Nothing here imports torch: a report is made on a laptop."""

from vivace.report.rows import Latency, Row, rows_of
from vivace.report.summary import summary

__all__ = ["Latency", "Row", "rows_of", "summary"]
