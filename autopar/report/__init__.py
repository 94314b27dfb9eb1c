"""Draw figures of a plan: layouts per module, memory by kind, timeline; a page with all of them;
and the notebook view.
"""

from autopar.report.card import card
from autopar.report.charts import layouts, memory
from autopar.report.page import report
from autopar.report.timelines import schedule, stage_memory, timeline

__all__ = ["card", "layouts", "memory", "report", "schedule", "stage_memory", "timeline"]
