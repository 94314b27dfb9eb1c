"""Kernels: the communication steps of emitted graphs, and custom operators with their reference
implementations."""
