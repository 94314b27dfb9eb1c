"""Layouts: how one tensor lies over the mesh, as text, part by part, and what an op asks of its operands."""

from autopar.layout.layout import Layout, Strategy
from autopar.layout.parts import local_range, local_shape, part_range
from autopar.layout.placements import PARTIAL, REPLICATE, Special, adds_up, splits

__all__ = ["PARTIAL", "REPLICATE", "Layout", "Special", "Strategy", "adds_up", "local_range", "local_shape", "part_range", "splits"]
