"""Kernels: the communication steps of emitted graphs, and custom ops with their reference
implementations."""
