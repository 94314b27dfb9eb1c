"""Trace and plan → Program."""

from autopar.emit.buckets import WaitingError, bucketed, can_share, on_bucket, slack_of
from autopar.emit.build import emit, emit_staged, returned_of
from autopar.emit.overlap import Orders, least_overlap, overlapped, places
from autopar.emit.simulation import simulated

__all__ = [
    "Orders",
    "WaitingError",
    "bucketed",
    "can_share",
    "emit",
    "emit_staged",
    "least_overlap",
    "on_bucket",
    "overlapped",
    "places",
    "returned_of",
    "simulated",
    "slack_of",
]
