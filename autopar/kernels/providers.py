"""Which provider (`autopar.kernels.peers`) serves a process group; where there is none, why."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.collectives import AxisGroup
from autopar.kernels.peers import Peers, SymmetricMemory

APART = "products run after or before their communication, not beside it"
_LOG = logging.getLogger(__name__)
_provided: dict[str, Peers] = {}
_symmetric: dict[tuple[str, torch.device], tuple[Peers | None, str]] = {}
_said: set[str] = set()


@contextmanager
def provided(name: str, peers: Peers) -> Iterator[None]:
    """Groups of this name are `peers` inside, in every thread."""
    if not name or name in _provided:
        raise KernelError(f"{name!r} cannot name these peers: it is empty or taken", remedy="choose another name")
    _provided[name] = peers
    try:
        yield
    finally:
        del _provided[name]


def peers_of(group: AxisGroup, device: torch.device) -> tuple[Peers | None, str]:
    """The provider through which the ranks of `group` reach each other's memory on `device`; or None, and why there is none.

    The first call for a group on a GPU is collective: its ranks agree, so that either all of them run the kernels or none does.
    """
    kind = "host" if device.type == "cpu" else "cuda"
    if not group.name:
        return None, "a fake group has no peers"
    if group.name in _provided:
        return (_provided[group.name], "") if library.has(device) else (None, library.why_not(kind))
    if device.type != "cuda":
        return None, "processes without GPUs do not reach each other's memory"
    if (group.name, device) not in _symmetric:
        _symmetric[group.name, device] = _find_symmetric(group, device)
    return _symmetric[group.name, device]


def may_have_peers(group: AxisGroup, device: torch.device) -> bool:
    """Whether `peers_of` could give a provider; known without asking anyone, and so while a compiler traces."""
    return bool(group.name) and (group.name in _provided or device.type == "cuda")


def runs_kernels(group: AxisGroup, device: torch.device) -> bool:
    """Whether to call the op of an overlapped product; while a compiler traces, the op, which a trace does not see into, asks again."""
    if torch.compiler.is_compiling():
        return may_have_peers(group, device)
    peers, reason = peers_of(group, device)
    if peers is None:
        say_once(group, APART, reason)
    return peers is not None


def counts_memory(group: AxisGroup) -> bool:
    """Whether this is a run on fake tensors that counts memory."""
    return not group.name and not torch.compiler.is_compiling()


def say_once(group: AxisGroup, doing: str, reason: str) -> None:
    """Log, once per process, that `doing` takes the slower way, and why. With a fake group nothing is moved anyway."""
    if group.name and reason not in _said:
        _said.add(reason)
        _LOG.warning("%s: %s", doing, reason)


def _find_symmetric(group: AxisGroup, device: torch.device) -> tuple[Peers | None, str]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    found: Peers | None = None
    reason = library.why_not("cuda")
    if not reason:
        try:
            found = SymmetricMemory(group.name, group.size, group.coordinate, device)
            found.regions("probe", 1, 1)
        except (RuntimeError, ImportError, AttributeError) as error:  # torch's own, where devices cannot map each other's memory
            found, reason = None, f"torch's symmetric memory is not available: {error}"
    everywhere = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=_resolve_process_group(group.name))
    if found is not None and not everywhere.item():
        found, reason = None, "another rank has no kernels or no symmetric memory"
    return found, reason
