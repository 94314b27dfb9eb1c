"""Marks for tests of native kernels. They skip a test with a reason if a compiler or a device is
missing."""

from __future__ import annotations

import pytest
import torch

from autopar.kernels.build import has_compiler

needs_host = pytest.mark.skipif(
    not has_compiler("host"), reason="there is no C++ compiler (g++, or $CXX)"
)
needs_nvcc = pytest.mark.skipif(not has_compiler("cuda"), reason="there is no nvcc (or $NVCC)")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
WORLDS = (1, 2, 3, 5, 8)
