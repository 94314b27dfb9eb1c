"""Training runs that others published, as data (`published_runs.csv`; its README has sources and
caveats), and as what autopar plans.

A run is a model's sizes, a cluster, degrees of parallelism and batch, and what was measured:
seconds of a step, bytes of a device's peak. `setups` says which of them can be planned, as what,
and why others cannot.
"""

from benchmarks.runs.reading import RUNS, Run
from benchmarks.runs.setups import Setup, setup_of, why_skipped

__all__ = ["RUNS", "Run", "Setup", "setup_of", "why_skipped"]
