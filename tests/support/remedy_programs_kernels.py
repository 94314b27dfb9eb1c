"""Programs for the remedies of kernels: building them and their operands. Kernels run as their
references."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import ops
from autopar.kernels import build, collectives, library, normed
from autopar.kernels import normed as normed_scatter
from autopar.kernels.bound_ops import part_of
from autopar.kernels.collectives import AxisGroup, use_groups
from autopar.kernels.overlapped import ChunkedDim
from autopar.kernels.packing import BucketLayout, pack, places
from autopar.kernels.peers import Blocks, VirtualRanks, provide_peers
from autopar.ops.norms import RmsNorm
from tests.support.remedy_programs import Program

_EQUATION, _EPS, _F32 = "mk,kn->mn", 1e-6, torch.float32
_A, _B, _X, _W = torch.ones(4, 3), torch.ones(3, 8), torch.ones(2, 8), torch.ones(8)
_COMPILER = """#!/bin/sh
while [ $# -gt 0 ]; do
  if [ "$1" = -o ]; then touch "$2"; fi
  shift
done
"""


def _with_references(work: Callable[[], object]) -> Callable[[], object]:
    """Run `work` with the references of the kernels."""

    def program() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOPAR_KERNELS", "reference")
            return work()

    return program


def _build(
    *,
    script: str = _COMPILER,
    name: str = "compiler",
    cache: str = "cache",
    sources: tuple[str, ...] = ("a.cu",),
    home: bool = True,
    variant: str = "release",
    kind: str = "host",
    writable: bool = True,
) -> Callable[[], object]:
    """Build a folder of kernels with a compiler that writes empty files."""

    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def program() -> object:
        with tempfile.TemporaryDirectory() as here, pytest.MonkeyPatch.context() as patch:
            folder = Path(here)
            for source in sources:
                (folder / source).touch()
            (folder / "compiler").write_text(script)
            (folder / "compiler").chmod(0o755)
            patch.setenv("CXX", str(folder / name))
            patch.delenv("XDG_CACHE_HOME", raising=False)
            if home:
                patch.setenv("AUTOPAR_KERNEL_CACHE", str(folder / cache))
            else:
                patch.delenv("AUTOPAR_KERNEL_CACHE", raising=False)
                patch.setattr(Path, "home", without_home)
            return build.build_library(kind, variant, folder=folder)

    return program


def _norm_sum(parts: Any, x: torch.Tensor = _X, weight: torch.Tensor = _W) -> Callable[[], object]:
    """Compute the norm of a sum of parts and a residual."""
    return _with_references(lambda: normed.reduce_add_rmsnorm(parts, x, weight, _EPS))


def _check_operands(dim: int = 0, residual: torch.Tensor = _X) -> Callable[[], object]:
    """Check the operands of a product whose scattered result is normalized."""
    norm, group = normed.AddNorm(residual, _W, _EPS, rounded=False), AxisGroup("", 2, 0)
    return lambda: normed_scatter._check(_EQUATION, _A, _B, norm, dim, group)


def _product(n: int) -> Callable[[], object]:
    over, residual = ChunkedDim.of(0, AxisGroup("", 1, 0), 1), torch.ones(4, 8)
    norm = RmsNorm(n, _EPS, _F32, _F32, _F32)
    return _with_references(
        lambda: normed_scatter.dot_reduce_add_rmsnorm(_EQUATION, (_A, _B), residual, _W, over, norm)
    )


def _pack(
    tensor: torch.Tensor, size: tuple[int, ...], *, dim: int = 0, parts: int = 1, **ranks: int
) -> Callable[[], object]:
    """Pack a tensor into a bucket."""
    return _with_references(
        lambda: pack([tensor], BucketLayout((size,), (dim,), parts), _F32, **ranks)
    )


def _pack_with_operator(dim: int) -> Callable[[], object]:
    """Pack a tensor into a bucket with the operator."""
    return _with_references(
        lambda: torch.ops.autopar.pack([torch.ones(2)], [2], [dim], 1, 0, 1, _F32, 1.0, False)
    )


def _provide(again: str) -> object:
    peers = VirtualRanks(2)
    with provide_peers("one", peers), provide_peers(again, peers):
        return None


def _within_groups() -> object:
    with use_groups([AxisGroup("", 1, 0)]):
        return collectives.current_groups()


def _in_chunks(*elements: int) -> Callable[[], object]:
    return lambda: places(BucketLayout(tuple((n,) for n in elements), (0,) * len(elements), 1))


PROGRAMS: dict[str, Program] = {
    "kernels/build.py cache_folder 0": Program(
        _build(home=False), "AUTOPAR_KERNEL_CACHE=FOLDER", _build()
    ),
    "kernels/build.py _unwritable 0": Program(
        _build(cache="a.cu/cache"),
        "choose another: AUTOPAR_KERNEL_CACHE=FOLDER",
        _build(cache="another"),
    ),
    "kernels/build.py compiler 0": Program(
        _build(name="absent"), "CXX=/path/to/it", _build(name="compiler")
    ),
    "kernels/build.py build_library 0": Program(
        _build(kind="cuda", variant="thread"),
        "build it with kind host",
        _build(kind="host", variant="thread"),
    ),
    "kernels/build.py build_library 1": Program(
        _build(variant="fast"), "use one of release", _build(variant="release")
    ),
    "kernels/build.py _build 0": Program(_build(sources=()), "reinstall the package", _build()),
    "kernels/build.py _compile 0": Program(
        _build(script='#!/bin/sh\n[ "$1" = --version ]\n'),
        "or set another compiler in CXX or NVCC",
        _build(),
    ),
    "kernels/library.py function 0": Program(
        _with_references(lambda: library.function("host", "ap_pack_host")),
        "call the reference instead",
        _pack(torch.ones(2), (2,)),
    ),
    "kernels/library.py check 0": Program(
        lambda: library.check(1, "ap_pack_host"),
        "the top of the kernel's file",
        lambda: library.check(0, "ap_pack_host"),
    ),
    "kernels/library.py code_of 0": Program(
        lambda: library.code_of(torch.complex64),
        "use one of torch.float32",
        lambda: library.code_of(torch.float32),
    ),
    "kernels/bound_ops.py part_of 0": Program(
        lambda: part_of(3, 4), "choose another layout or mesh", lambda: part_of(3, 3)
    ),
    "kernels/packing.py places 0": Program(
        _in_chunks(2**32), "pack it in several", _in_chunks(2**30, 2**30)
    ),
    "kernels/collectives.py current_groups 0": Program(
        collectives.current_groups, "run the graph inside use_groups(...)", _within_groups
    ),
    "kernels/normed.py _forward 0": Program(
        _norm_sum([]), "pass at least one part", _norm_sum([_X])
    ),
    "kernels/normed.py check_normed 0": Program(
        _norm_sum([_X], weight=_W[1:]), "a weight [hidden]", _norm_sum([_X])
    ),
    "kernels/normed.py check_normed 1": Program(
        _norm_sum([_X[:1]]), "pass parts with the shape of the residual", _norm_sum([_X])
    ),
    "kernels/normed.py check_normed 2": Program(
        _norm_sum([_X.double()]),
        "in one dtype on one device",
        _norm_sum([_X.double()], _X.double(), _W.double()),
    ),
    "kernels/normed.py _check 0": Program(
        _check_operands(dim=1), "scatter along a dim before the last", _check_operands(dim=0)
    ),
    "kernels/normed.py _check 1": Program(
        _check_operands(residual=_X[:1]), "of the rank's shard of the product", _check_operands()
    ),
    "kernels/normed.py dot_reduce_add_rmsnorm 0": Program(
        _product(9),
        "compute the norm separately from the product",
        lambda: (ops.dot(_EQUATION, _A, _B), _product(8)()),
    ),
    "kernels/packing.py _check 0": Program(
        _pack(torch.ones(2), (2,), parts=2, first=1, count=2),
        "within the parts",
        _pack(torch.ones(1), (2,), parts=2, first=1, count=1),
    ),
    "kernels/packing.py _check 1": Program(
        _pack(torch.ones(2, dtype=torch.int32), (2,)),
        "only floating-point tensors",
        _pack(torch.ones(2), (2,)),
    ),
    "kernels/packing.py _check 2": Program(
        _pack(torch.ones(6, 5), (7, 5), parts=2, first=1, count=1),
        "see BucketLayout.local_sizes",
        _pack(
            torch.ones(BucketLayout(((7, 5),), (0,), 2).local_sizes(1, 1)[0]),
            (7, 5),
            parts=2,
            first=1,
            count=1,
        ),
    ),
    "kernels/packing.py _whole_sizes 0": Program(
        _pack_with_operator(1), "count dims from 0", _pack_with_operator(0)
    ),
    "kernels/peers.py Peers.__init__ 0": Program(
        lambda: VirtualRanks(2, blocks=Blocks()), "omit blocks", lambda: VirtualRanks(2)
    ),
    "kernels/peers.py VirtualRanks.run 0": Program(
        lambda: VirtualRanks(2).run([0], []),
        "pass the work of all ranks in one call",
        lambda: VirtualRanks(2).run([0, 1], []),
    ),
    "kernels/peers.py provide_peers 0": Program(
        lambda: _provide("one"), "choose another name", lambda: _provide("two")
    ),
}
