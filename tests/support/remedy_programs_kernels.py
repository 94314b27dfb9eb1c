"""Programs for the remedies of kernels: how they are built, and what they are given. Where they
run, it is as their references."""

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


def _as_references(work: Callable[[], object]) -> Callable[[], object]:
    """Where kernels run as their references."""

    def program() -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("AUTOPAR_KERNELS", "reference")
            return work()

    return program


def _built(
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
    """Build a folder of kernels with a compiler that makes empty files."""

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


def _normed(parts: Any, x: torch.Tensor = _X, weight: torch.Tensor = _W) -> Callable[[], object]:
    """The norm of a sum of parts and a residual."""
    return _as_references(lambda: normed.reduce_add_rmsnorm(parts, x, weight, _EPS))


def _scattered(dim: int = 0, residual: torch.Tensor = _X) -> Callable[[], object]:
    """The operands of a product whose result is scattered and normed."""
    norm, group = normed.AddNorm(residual, _W, _EPS, rounded=False), AxisGroup("", 2, 0)
    return lambda: normed_scatter._check(_EQUATION, _A, _B, norm, dim, group)


def _product(n: int) -> Callable[[], object]:
    over, residual = ChunkedDim.of(0, AxisGroup("", 1, 0), 1), torch.ones(4, 8)
    norm = RmsNorm(n, _EPS, _F32, _F32, _F32)
    return _as_references(
        lambda: normed_scatter.dot_reduce_add_rmsnorm(_EQUATION, (_A, _B), residual, _W, over, norm)
    )


def _packed(
    tensor: torch.Tensor, size: tuple[int, ...], *, dim: int = 0, parts: int = 1, **ranks: int
) -> Callable[[], object]:
    """A tensor in a bucket."""
    return _as_references(
        lambda: pack([tensor], BucketLayout((size,), (dim,), parts), _F32, **ranks)
    )


def _cut(dim: int) -> Callable[[], object]:
    """A tensor in a bucket, by the operator that packs it."""
    return _as_references(
        lambda: torch.ops.autopar.pack([torch.ones(2)], [2], [dim], 1, 0, 1, _F32, 1.0, False)
    )


def _provided(again: str) -> object:
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
        _built(home=False), "AUTOPAR_KERNEL_CACHE=FOLDER", _built()
    ),
    "kernels/build.py _unwritable 0": Program(
        _built(cache="a.cu/cache"),
        "choose another: AUTOPAR_KERNEL_CACHE=FOLDER",
        _built(cache="another"),
    ),
    "kernels/build.py compiler 0": Program(
        _built(name="absent"), "CXX=/path/to/it", _built(name="compiler")
    ),
    "kernels/build.py build_library 0": Program(
        _built(kind="cuda", variant="thread"),
        "build it with kind host",
        _built(kind="host", variant="thread"),
    ),
    "kernels/build.py build_library 1": Program(
        _built(variant="fast"), "use one of release", _built(variant="release")
    ),
    "kernels/build.py _build 0": Program(_built(sources=()), "reinstall the package", _built()),
    "kernels/build.py _compile 0": Program(
        _built(script='#!/bin/sh\n[ "$1" = --version ]\n'),
        "or set another compiler in CXX or NVCC",
        _built(),
    ),
    "kernels/library.py function 0": Program(
        _as_references(lambda: library.function("host", "ap_pack_host")),
        "call the reference instead",
        _packed(torch.ones(2), (2,)),
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
    "kernels/normed.py _forward 0": Program(_normed([]), "pass at least one part", _normed([_X])),
    "kernels/normed.py check_normed 0": Program(
        _normed([_X], weight=_W[1:]), "a weight [hidden]", _normed([_X])
    ),
    "kernels/normed.py check_normed 1": Program(
        _normed([_X[:1]]), "pass parts with the shape of the residual", _normed([_X])
    ),
    "kernels/normed.py check_normed 2": Program(
        _normed([_X.double()]),
        "in one dtype on one device",
        _normed([_X.double()], _X.double(), _W.double()),
    ),
    "kernels/normed.py _check 0": Program(
        _scattered(dim=1), "scatter along a dim before the last", _scattered(dim=0)
    ),
    "kernels/normed.py _check 1": Program(
        _scattered(residual=_X[:1]), "of the rank's shard of the product", _scattered()
    ),
    "kernels/normed.py dot_reduce_add_rmsnorm 0": Program(
        _product(9),
        "compute the norm separately from the product",
        lambda: (ops.dot(_EQUATION, _A, _B), _product(8)()),
    ),
    "kernels/packing.py _check 0": Program(
        _packed(torch.ones(2), (2,), parts=2, first=1, count=2),
        "within the parts",
        _packed(torch.ones(1), (2,), parts=2, first=1, count=1),
    ),
    "kernels/packing.py _check 1": Program(
        _packed(torch.ones(2, dtype=torch.int32), (2,)),
        "only floating-point tensors",
        _packed(torch.ones(2), (2,)),
    ),
    "kernels/packing.py _check 2": Program(
        _packed(torch.ones(6, 5), (7, 5), parts=2, first=1, count=1),
        "see BucketLayout.local_sizes",
        _packed(
            torch.ones(BucketLayout(((7, 5),), (0,), 2).local_sizes(1, 1)[0]),
            (7, 5),
            parts=2,
            first=1,
            count=1,
        ),
    ),
    "kernels/packing.py _whole_sizes 0": Program(_cut(1), "count dims from 0", _cut(0)),
    "kernels/peers.py Peers.__init__ 0": Program(
        lambda: VirtualRanks(2, blocks=Blocks()), "omit blocks", lambda: VirtualRanks(2)
    ),
    "kernels/peers.py VirtualRanks.run 0": Program(
        lambda: VirtualRanks(2).run([0], []),
        "pass the work of all ranks in one call",
        lambda: VirtualRanks(2).run([0, 1], []),
    ),
    "kernels/peers.py provide_peers 0": Program(
        lambda: _provided("one"), "choose another name", lambda: _provided("two")
    ),
}
