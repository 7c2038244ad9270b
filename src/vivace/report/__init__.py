"""Reports as pure functions of Records. Nothing here imports torch, so a report can be made on a laptop.

The HTML page is made by `vivace.report.page.render_page`, which is imported separately since it needs Jinja and Pillow.
"""

from vivace.report.fidelity import Fidelity
from vivace.report.latency import Latency
from vivace.report.quality_gate import Judgement
from vivace.report.rows import Row, rows_of
from vivace.report.summary import summary
from vivace.report.table import FORMATS, print_table, render

__all__ = [
    "FORMATS",
    "Fidelity",
    "Judgement",
    "Latency",
    "Row",
    "print_table",
    "render",
    "rows_of",
    "summary",
]
