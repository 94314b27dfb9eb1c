"""Trace and plan → Program."""

from autopar.emit.build import emit

__all__ = ["emit"]
