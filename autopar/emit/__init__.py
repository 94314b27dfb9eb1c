"""Emission: turn a trace and a plan into a program."""

from autopar.emit.buckets import (
    WaitingError,
    apply_buckets,
    buckets_without,
    can_share,
    on_bucket,
    slack_of,
)
from autopar.emit.overlap import Orders, apply_overlap, least_overlap, places
from autopar.emit.program_builder import emit, emit_stage, returned_of
from autopar.emit.simulation import simulate_program

__all__ = [
    "Orders",
    "WaitingError",
    "apply_buckets",
    "apply_overlap",
    "buckets_without",
    "can_share",
    "emit",
    "emit_stage",
    "least_overlap",
    "on_bucket",
    "places",
    "returned_of",
    "simulate_program",
    "slack_of",
]
