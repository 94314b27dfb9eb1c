"""The ranks of a group as peers: memory that all of them reach, and lanes in which their work runs.

Terms. A *rank* has a compute lane and a copy lane; a *phase* is a piece of a rank's work that runs
in one of them. *Regions* are one piece of memory per rank that every rank can read and write, with
flags that signal between them (`autopar_csrc/include/epoch.h`). An *epoch* is one use of a region;
each rank counts its own, and all begin the same uses in the same order.

The one rule: producers come before those who wait for them. A list of phases keeps it if no phase
waits for a later one when they run phase by phase, each for all ranks in turn. Then it ends with
each of the three providers:

    VirtualRanks      all ranks in one process and one thread: phase by phase. On a GPU each rank
                      has two streams of its own
    HostThreads       two threads per rank, which run at once; only the signals order them
    SymmetricMemory   one rank per process, with a GPU each: the peers' memory is mapped into this
                      process

In every provider a copy lane begins after the work that its rank's compute lane was given before,
and the compute lane's work ends after the copy lane's. So memory that only this rank uses may be
released after `run`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.collectives import AxisGroup

# --------------------------------------------------------------------------------------------------
# Lanes, which are threads of the host or streams of a device.

COMPUTE, COPY = "compute", "copy"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a phase runs: the host, or a stream of a device."""

    kind: str
    stream: torch.cuda.Stream | None = None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the kernels, on the lane's stream.

        Args:
            name: the function's name without ``ap_`` and ``_host`` or ``_cuda``. arguments: all but
                the stream.

        Raises:
            KernelError: if it returns an error; in debug builds also if a signal has not come in
                time.
        """
        library.step(self.kind, name, None if self.stream is None else self.stream.cuda_stream)(
            *arguments
        )


Work = Callable[[Lane, int], None]


@dataclass(frozen=True, slots=True)
class TransferPhase:
    """A piece of a rank's work: `work(lane, rank)`, run in its compute or its copy lane."""

    lane: str
    work: Work


@dataclass(frozen=True, slots=True)
class Blocks:
    """A copy lane that is one kernel of few blocks (`autopar_csrc/include/blocks.h`) instead of a
    device's copy engine.

    Attributes:
        num_blocks: each takes a multiprocessor from the products that run at the same time. All
            uses of a provider's regions have the same number.
        bytes_per_s: the limit for all of them together; 0 for none.
    """

    num_blocks: int = 4
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneStreams:
    """A rank's two lanes on a device.

    Copies and their signals have priority: they are short, and a product beside them can wait.
    """

    compute: torch.cuda.Stream
    copy: torch.cuda.Stream

    @staticmethod
    def new(device: torch.device) -> LaneStreams:
        """Make the two streams of a rank."""
        return LaneStreams(torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1))

    def fork(self) -> None:
        """Let both lanes begin after what is enqueued on the current stream."""
        current = torch.cuda.current_stream(self.compute.device)
        if current != self.compute:
            self.compute.wait_stream(current)
        self.copy.wait_stream(current)

    def lane(self, name: str) -> Lane:
        """Return the lane of this name."""
        return Lane("cuda", self.compute if name == COMPUTE else self.copy)

    def join(self) -> None:
        """Let the current stream wait for both lanes."""
        current = torch.cuda.current_stream(self.compute.device)
        for stream in (self.compute, self.copy):
            if stream != current:
                current.wait_stream(stream)


@contextmanager
def within(lane: Lane) -> Iterator[None]:
    """Enqueue torch's own kernels on the lane's stream."""
    if lane.stream is None:
        yield
    else:
        with torch.cuda.stream(lane.stream):
            yield


_LOG = logging.getLogger(__name__)
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Regions:
    """Memory that all ranks reach, in order of the ranks.

    Attributes:
        data: bytes. flags: words, int64, zero at first. epochs: how often each rank of this process
            has used them.
    """

    data: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epochs: list[int]

    def begin(self, rank: int) -> int:
        """Begin a use and return its number, from 1."""
        self.epochs[rank] += 1
        return self.epochs[rank]


class Peers(ABC):
    """The ranks of a group, as seen from this process.

    Args:
        size: the number of ranks. device: the device of their tensors.
        blocks: the kernel that copies for the overlapped products on a device; None for its copy
            engine.

    Raises:
        KernelError: for blocks on a device whose code does not run.
    """

    def __init__(self, size: int, device: torch.device, blocks: Blocks | None = None) -> None:
        self.size, self.device, self._blocks = size, device, blocks
        self.kind = "host" if device.type == "cpu" else "cuda"
        if blocks is not None and not library.on_device(self.kind):
            raise KernelError(
                "block copies are only available on a device",
                remedy="omit blocks when the ranks are threads on the host",
            )
        self._regions: dict[Hashable, Regions] = {}
        self._lock = threading.Lock()
        self._may_be_refused = library.on_device(self.kind)

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose work this process does."""

    @abstractmethod
    def run(self, ranks: Sequence[int], phases: Sequence[TransferPhase]) -> None:
        """Run the phases for some of `ranks`; return when they are done or, on a GPU, enqueued."""

    def move(self, lane: Lane, name: str, *arguments: object) -> None:
        """Call the function of a copy lane: by its name, or as a kernel of blocks."""
        if self._blocks is None:
            lane.call(name, *arguments)
        else:
            lane.call(
                f"{name}_by_blocks", *arguments, self._blocks.num_blocks, self._blocks.bytes_per_s
            )

    def regions(self, key: Hashable, num_bytes: int, num_words: int) -> Regions:
        """Return the regions of a name, which are made at the first call and kept.

        Args:
            key: the name. num_bytes, num_words: bytes, and 64-bit words of flags, per rank.
        """
        with self._lock:
            if key not in self._regions:
                self._regions[key] = self._new_regions(num_bytes, num_words)
            return self._regions[key]

    def _say_refused(self) -> None:
        """Log once that signals and waits are not operations of the device's streams, if so."""
        if self._may_be_refused and library.num_refused(self.kind):
            self._may_be_refused = False
            _LOG.warning(
                "the driver does not support signals as stream operations: they run as kernels,"
                " which compete with the matrix product, so less of the communication is hidden"
            )

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        """Make regions of plain tensors, for ranks that are all in this process."""
        data = tuple(
            torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            for _ in range(self.size)
        )
        flags = tuple(
            torch.zeros(num_words, dtype=torch.int64, device=self.device) for _ in range(self.size)
        )
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)  # every rank's streams see the zeros
        return Regions(data, flags, [0] * self.size)


class VirtualRanks(Peers):
    """All ranks in this thread. Each phase runs for every rank in turn, so a call needs the work of
    all ranks.

    Args:
        size, device, blocks: see `Peers`; all ranks' kernels must fit on the device at once.
        pause: called with rank and phase before each; tests use it to slow ranks down.
    """

    def __init__(
        self,
        size: int,
        device: torch.device | str = "cpu",
        pause: Callable[[int, int], None] | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(size, torch.device(device), blocks)
        self._pause = pause
        self._streams = (
            [LaneStreams.new(self.device) for _ in range(size)] if self.kind == "cuda" else []
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    def run(self, ranks: Sequence[int], phases: Sequence[TransferPhase]) -> None:
        """See `Peers.run`."""
        if tuple(ranks) != self.ranks:
            raise KernelError(
                "virtual ranks must run together",
                remedy="pass the work of all ranks in one call, or use HostThreads",
            )
        for streams in self._streams:
            streams.fork()
        for index, phase in enumerate(phases):
            for rank in ranks:
                lane = self._streams[rank].lane(phase.lane) if self._streams else Lane("host")
                with within(lane):
                    if self._pause is not None:
                        self._pause(rank, index)
                    phase.work(lane, rank)
        for streams in self._streams:
            streams.join()
        self._say_refused()


class HostThreads(Peers):
    """Ranks that are threads of this process, on the CPU. Each has a second thread as its copy
    lane.

    A rank's thread calls `run` with its own rank; with several ranks `run` starts a thread for
    each. Close it at the end, or use it in a ``with``. If one rank fails, ranks that wait for it
    keep waiting; with ``AUTOPAR_KERNELS=debug`` for a limited time.

    Args:
        size: the number of ranks. pause: see `VirtualRanks`.
    """

    def __init__(self, size: int, pause: Callable[[int, int], None] | None = None) -> None:
        super().__init__(size, torch.device("cpu"))
        self._pause = pause
        self._copies = [ThreadPoolExecutor(1, f"autopar-copy-{rank}") for rank in range(size)]
        self._computes = [ThreadPoolExecutor(1, f"autopar-rank-{rank}") for rank in range(size)]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(self.size))

    def run(self, ranks: Sequence[int], phases: Sequence[TransferPhase]) -> None:
        """See `Peers.run`."""
        if len(ranks) == 1:
            self._run_one(ranks[0], phases)
        else:
            _results([self._computes[rank].submit(self._run_one, rank, phases) for rank in ranks])

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` in every rank's thread at once; return the results in order of the
        ranks."""
        return _results([self._computes[rank].submit(work, rank) for rank in self.ranks])

    def close(self) -> None:
        """End the threads."""
        for pool in (*self._computes, *self._copies):
            pool.shutdown()

    def __enter__(self) -> HostThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_one(self, rank: int, phases: Sequence[TransferPhase]) -> None:
        copying = self._copies[rank].submit(self._run_lane, COPY, rank, phases)
        try:
            self._run_lane(COMPUTE, rank, phases)
        finally:
            copying.result()

    def _run_lane(self, name: str, rank: int, phases: Sequence[TransferPhase]) -> None:
        for index, phase in enumerate(phases):
            if phase.lane == name:
                if self._pause is not None:
                    self._pause(rank, index)
                phase.work(Lane("host"), rank)


class SymmetricMemory(Peers):
    """Processes with a GPU each, whose memory torch's symmetric memory maps into one another.

    Making regions is collective: all processes of the group make the same ones in the same order,
    and wait for each other.
    """

    def __init__(
        self, name: str, size: int, rank: int, device: torch.device, blocks: Blocks | None = None
    ) -> None:
        super().__init__(size, device, blocks)
        self._name, self._rank = name, rank
        self._copy = torch.cuda.Stream(device, priority=-1)
        self._held: list[object] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of this process."""
        return (self._rank,)

    def run(self, ranks: Sequence[int], phases: Sequence[TransferPhase]) -> None:
        """See `Peers.run`."""
        assert tuple(ranks) == self.ranks, f"this process is rank {self._rank}, not {tuple(ranks)}"
        streams = LaneStreams(torch.cuda.current_stream(self.device), self._copy)
        streams.fork()
        for phase in phases:
            lane = streams.lane(phase.lane)
            with within(lane):
                phase.work(lane, self._rank)
        streams.join()
        self._say_refused()

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        import torch.distributed._symmetric_memory as symmetric

        begin = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        own = symmetric.empty(begin + num_words * 8, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(own, self._name)
        own.zero_()
        handle.barrier()  # no rank signals before all flags are zero
        torch.cuda.synchronize(self.device)
        self._held += [own, handle]  # the peers' views below do not keep the mapping alive
        data = tuple(
            handle.get_buffer(rank, (max(num_bytes, 1),), torch.uint8, 0)
            for rank in range(self.size)
        )
        flags = tuple(
            handle.get_buffer(rank, (num_words,), torch.int64, begin // 8)
            for rank in range(self.size)
        )
        return Regions(data, flags, [0] * self.size)


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """Return all results. If some failed, raise the first one's error after all have ended."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return an array of pointers, as C functions of the host take them."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


# --------------------------------------------------------------------------------------------------
# The provider that serves a process group, or the reason why there is none.

APART = "matrix products run before or after their communication, without overlap"
_provided: dict[str, Peers] = {}
_symmetric: dict[tuple[str, torch.device], tuple[Peers | None, str]] = {}
_said: set[str] = set()


@contextmanager
def provide_peers(name: str, peers: Peers) -> Iterator[None]:
    """Let `peers` serve groups of this name inside, in every thread."""
    if not name or name in _provided:
        raise KernelError(
            f"{name!r} cannot name these peers: it is empty or in use", remedy="choose another name"
        )
    _provided[name] = peers
    try:
        yield
    finally:
        del _provided[name]


def peers_of(group: AxisGroup, device: torch.device) -> tuple[Peers | None, str]:
    """Return the provider through which the ranks of `group` reach each other's memory on `device`;
    or None, and the reason.

    The first call for a group on a GPU is collective: its ranks agree, so that either all of them
    run the kernels or none does.
    """
    kind = "host" if device.type == "cpu" else "cuda"
    if not group.name:
        return None, "a fake group has no peers"
    if group.name in _provided:
        return (_provided[group.name], "") if library.has(device) else (None, library.why_not(kind))
    if device.type != "cuda":
        return None, "processes without GPUs cannot access each other's memory"
    if (group.name, device) not in _symmetric:
        _symmetric[group.name, device] = _find_symmetric(group, device)
    return _symmetric[group.name, device]


def may_have_peers(group: AxisGroup, device: torch.device) -> bool:
    """Return whether `peers_of` could return a provider. It asks no other rank, so a compiler can
    trace it."""
    return bool(group.name) and (group.name in _provided or device.type == "cuda")


def runs_kernels(group: AxisGroup, device: torch.device) -> bool:
    """Return whether to call the op of an overlapped product.

    While a compiler traces, the op itself asks again, since the trace does not see into it.
    """
    if torch.compiler.is_compiling():
        return may_have_peers(group, device)
    peers, reason = peers_of(group, device)
    if peers is None:
        say_once(group, APART, reason)
    return peers is not None


def counts_memory(group: AxisGroup) -> bool:
    """Return whether this is a run on fake tensors that counts memory."""
    return not group.name and not torch.compiler.is_compiling()


def say_once(group: AxisGroup, doing: str, reason: str) -> None:
    """Log once per process that something takes the slower way, except for fake groups, which move
    nothing.

    Args:
        group: the ranks. doing: what takes the slower way. reason: why.
    """
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
        except (
            RuntimeError,
            ImportError,
            AttributeError,
        ) as error:  # torch's own, where devices cannot map each other's memory
            found, reason = None, f"torch symmetric memory is not available: {error}"
    everywhere = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=_resolve_process_group(group.name))
    if found is not None and not everywhere.item():
        found, reason = None, "another rank has no kernels or no symmetric memory"
    return found, reason
