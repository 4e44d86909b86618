"""Read routing that was recorded from a real model, whatever wrote it down.

Knows nothing of the laws that draw routing, or of what is done with it.
"""

from tilepipe.workload.trace.counts import read_counts
from tilepipe.workload.trace.reading import place_of_row, read_trace
from tilepipe.workload.trace.rows import Selection, Trace, deal
from tilepipe.workload.trace.sheet import sheet
from tilepipe.workload.trace.survey import LayerSurvey, Survey, survey

__all__ = [
    "LayerSurvey",
    "Selection",
    "Survey",
    "Trace",
    "deal",
    "place_of_row",
    "read_counts",
    "read_trace",
    "sheet",
    "survey",
]
