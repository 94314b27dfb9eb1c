"""A model and a batch in, one joint forward and backward graph in normal form out."""

from __future__ import annotations

from autopar.capture.capturing import capture
from autopar.capture.execute import execute
from autopar.capture.trace import Input, Output, Parameter, Trace

__all__ = ["Input", "Output", "Parameter", "Trace", "capture", "execute"]
