"""Trace and plan → Program."""

from autopar.emit.build import emit
from autopar.emit.staged import emit_staged

__all__ = ["emit", "emit_staged"]
