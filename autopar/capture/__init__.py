"""Capture a model and a batch as one joint forward and backward graph in normal form."""

from __future__ import annotations

from autopar.capture.capturing import capture
from autopar.capture.execute import execute
from autopar.capture.trace import Input, Output, Parameter, Trace

__all__ = ["Input", "Output", "Parameter", "Trace", "capture", "execute"]
