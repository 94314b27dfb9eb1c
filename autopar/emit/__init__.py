"""Trace and plan → Program."""

from autopar.emit.build import emit
from autopar.emit.overlap import overlapped, with_held
from autopar.emit.simulation import simulated
from autopar.emit.staged import emit_staged

__all__ = ["emit", "emit_staged", "overlapped", "simulated", "with_held"]
