"""The ranks of a group as peers, with shared memory and lanes in which their work runs.

Each *rank* has a compute lane and a copy lane. A *phase* is a part of a rank's work that runs in
one of its lanes. *Regions* are memory, one piece per rank, that every rank can read and write, with
flags for signals between ranks (`autopar_csrc/include/epoch.h`). An *epoch* is one use of a region.
Each rank counts its epochs, and all ranks begin the same uses in the same order.

Producers must run before the phases that wait for them: if phases run one after another, each for
all ranks in turn, no phase may wait for a later one. A list of phases that satisfies this rule
terminates with each of the three providers:

    VirtualRanks      all ranks in one process and one thread, phase by phase. On a GPU, each rank
                      has two streams
    HostThreads       two concurrent threads per rank, which are synchronized only by signals
    SymmetricMemory   one rank with a GPU per process. The memory of the peers is mapped into this
                      process

In every provider, the copy lane of a rank begins after the work that was previously given to its
compute lane, and the compute lane ends after the copy lane. Memory that only this rank uses may
therefore be released after `run`.
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
# Lanes, which are host threads or device streams.

COMPUTE, COPY = "compute", "copy"


@dataclass(frozen=True, slots=True)
class Lane:
    """The place where a phase runs: the host, or a stream of a device."""

    kind: str
    stream: torch.cuda.Stream | None = None

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the kernels on the stream of the lane.

        Args:
            name: the name of the function without ``ap_`` and ``_host`` or ``_cuda``.
            arguments: all arguments except the stream.

        Raises:
            KernelError: if the function returns an error. In debug builds, this includes a time-out
                of a wait for a signal.
        """
        library.step(self.kind, name, None if self.stream is None else self.stream.cuda_stream)(
            *arguments
        )


Work = Callable[[Lane, int], None]


@dataclass(frozen=True, slots=True)
class TransferPhase:
    """A part of a rank's work: `work(lane, rank)`, which runs in its compute or copy lane."""

    lane: str
    work: Work


@dataclass(frozen=True, slots=True)
class Blocks:
    """A copy lane that uses a kernel with few blocks (`autopar_csrc/include/blocks.h`) instead of
    the copy engine of the device.

    Attributes:
        num_blocks: the number of blocks. Each block occupies a multiprocessor, which concurrent
            products cannot use. It must be equal for all uses of a provider's regions.
        bytes_per_s: the bandwidth limit of all blocks together; 0 for no limit.
    """

    num_blocks: int = 4
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LaneStreams:
    """The two lanes of a rank on a device.

    Copies and their signals have a higher priority than products, since they are short.
    """

    compute: torch.cuda.Stream
    copy: torch.cuda.Stream

    @staticmethod
    def new(device: torch.device) -> LaneStreams:
        """Create the two streams of a rank."""
        return LaneStreams(torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1))

    def fork(self) -> None:
        """Make both lanes wait for the work that is enqueued on the current stream."""
        current = torch.cuda.current_stream(self.compute.device)
        if current != self.compute:
            self.compute.wait_stream(current)
        self.copy.wait_stream(current)

    def lane(self, name: str) -> Lane:
        """Return the lane with the given name."""
        return Lane("cuda", self.compute if name == COMPUTE else self.copy)

    def join(self) -> None:
        """Make the current stream wait for both lanes."""
        current = torch.cuda.current_stream(self.compute.device)
        for stream in (self.compute, self.copy):
            if stream != current:
                current.wait_stream(stream)


@contextmanager
def enqueued_on(lane: Lane) -> Iterator[None]:
    """A context in which torch's kernels are enqueued on the stream of a lane."""
    if lane.stream is None:
        yield
    else:
        with torch.cuda.stream(lane.stream):
            yield


_LOG = logging.getLogger(__name__)
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Regions:
    """Shared memory of all ranks, in rank order.

    Attributes:
        data: a uint8 tensor per rank.
        flags: an int64 tensor per rank, which is initially zero.
        epochs: the number of uses by each rank of this process.
    """

    data: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epochs: list[int]

    def begin(self, rank: int) -> int:
        """Begin a use. Return its number, counted from 1."""
        self.epochs[rank] += 1
        return self.epochs[rank]


class Peers(ABC):
    """The ranks of a group, from the view of this process.

    Args:
        size: the number of ranks.
        device: the device of their tensors.
        blocks: the copy kernel of overlapped products; None for the copy engine of the device.

    Raises:
        KernelError: if `blocks` is given and no device code runs.
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
        """Run phases for some of `ranks`. Return when they have finished or, on a GPU, are
        enqueued.

        Args:
            ranks: the ranks.
            phases: the phases of each rank, in order.
        """

    def move(self, lane: Lane, name: str, *arguments: object) -> None:
        """Call a copy function: with the copy engine, or as a kernel with few blocks."""
        if self._blocks is None:
            lane.call(name, *arguments)
        else:
            lane.call(
                f"{name}_by_blocks", *arguments, self._blocks.num_blocks, self._blocks.bytes_per_s
            )

    def regions(self, key: Hashable, num_bytes: int, num_words: int) -> Regions:
        """Return the regions of a key. They are created at the first call and kept.

        Args:
            key: the key.
            num_bytes, num_words: the number of bytes, and of 64-bit words of flags, per rank.
        """
        with self._lock:
            if key not in self._regions:
                self._regions[key] = self._new_regions(num_bytes, num_words)
            return self._regions[key]

    def _log_refused(self) -> None:
        """Log once if the device does not support signals and waits as stream operations."""
        if self._may_be_refused and library.num_refused(self.kind):
            self._may_be_refused = False
            _LOG.warning(
                "the driver does not support signals as stream operations: they run as kernels,"
                " which compete with the matrix product, so less of the communication is hidden"
            )

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        """Create regions of plain tensors, for ranks that are all in this process."""
        data = tuple(
            torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)
            for _ in range(self.size)
        )
        flags = tuple(
            torch.zeros(num_words, dtype=torch.int64, device=self.device) for _ in range(self.size)
        )
        if self.kind == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # makes the zeros visible to the streams of all ranks
        return Regions(data, flags, [0] * self.size)


class VirtualRanks(Peers):
    """All ranks in this thread. Each phase runs for all ranks in turn, so a call must include all
    ranks.

    Args:
        size, device, blocks: see `Peers`. The kernels of all ranks must fit on the device at the
            same time.
        pause: called with the rank and the index of the phase before each phase. Tests use it to
            delay ranks.
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
                with enqueued_on(lane):
                    if self._pause is not None:
                        self._pause(rank, index)
                    phase.work(lane, rank)
        for streams in self._streams:
            streams.join()
        self._log_refused()


class HostThreads(Peers):
    """Ranks that are threads of this process, on the CPU. Each rank has a second thread as its copy
    lane.

    The thread of a rank calls `run` with its rank; if `run` is called with several ranks, it uses a
    thread for each. Call `close` at the end, or use this as a context manager. If a rank fails,
    ranks that wait for it do not terminate, except with ``AUTOPAR_KERNELS=debug``, which limits the
    wait.

    Args:
        size: the number of ranks.
        pause: see `VirtualRanks`.
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

    def run_on_each(self, work: Callable[[int], Any]) -> list[Any]:
        """Call `work(rank)` concurrently in the threads of all ranks. Return the results in rank
        order."""
        return _results([self._computes[rank].submit(work, rank) for rank in self.ranks])

    def close(self) -> None:
        """Stop the threads."""
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
    """Processes with one GPU each. torch's symmetric memory maps the memory of the GPUs into all
    processes.

    The creation of regions is collective: all processes of the group must create the same regions
    in the same order, and wait for each other.
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
            with enqueued_on(lane):
                phase.work(lane, self._rank)
        streams.join()
        self._log_refused()

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        import torch.distributed._symmetric_memory as symmetric

        begin = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        memory = symmetric.empty(begin + num_words * 8, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(memory, self._name)
        memory.zero_()
        handle.barrier()  # no rank may signal before all flags are zero
        torch.cuda.synchronize(self.device)
        self._held += [memory, handle]  # the peers' views below do not keep the mapping alive
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
    """Return all results. If some failed, wait for all and raise the first error."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of tensors as an array of pointers for C functions of the host."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


# --------------------------------------------------------------------------------------------------
# The provider for a process group, or the reason why there is none.

APART = "matrix products run before or after their communication, without overlap"
_provided: dict[str, Peers] = {}
_symmetric: dict[tuple[str, torch.device], tuple[Peers | None, str]] = {}
_said: set[str] = set()


@contextmanager
def provide_peers(name: str, peers: Peers) -> Iterator[None]:
    """A context in which groups of a name use the given peers, in every thread.

    Args:
        name: the name of the groups.
        peers: the provider.

    Raises:
        KernelError: if the name is empty or in use.
    """
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
    """Return the provider through which the ranks of `group` access each other's memory on
    `device`, and an empty reason; or None and the reason why there is none.

    The first call for a group on a GPU is collective: its ranks agree, so that either all or none
    of them run the kernels.
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
    """Return whether `peers_of` could return a provider. This does not communicate, so a compiler
    can trace it."""
    return bool(group.name) and (group.name in _provided or device.type == "cuda")


def runs_kernels(group: AxisGroup, device: torch.device) -> bool:
    """Return whether to call the op of an overlapped product.

    Under a compiler, which does not trace into the op, the op checks again when it runs.
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
    """Log once per process that a slower variant runs. Nothing is logged for fake groups, which do
    not communicate.

    Args:
        group: the group.
        doing: a description of the slower variant.
        reason: the reason why it runs.
    """
    if group.name and reason not in _said:
        _said.add(reason)
        _LOG.warning("%s: %s", doing, reason)


def _find_symmetric(group: AxisGroup, device: torch.device) -> tuple[Peers | None, str]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    peers: Peers | None = None
    reason = library.why_not("cuda")
    if not reason:
        try:
            peers = SymmetricMemory(group.name, group.size, group.coordinate, device)
            peers.regions("probe", 1, 1)
        # torch raises these errors if devices cannot map each other's memory
        except (RuntimeError, ImportError, AttributeError) as error:
            peers, reason = None, f"torch symmetric memory is not available: {error}"
    everywhere = torch.tensor([peers is not None], dtype=torch.int32, device=device)
    dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=_resolve_process_group(group.name))
    if peers is not None and not everywhere.item():
        peers, reason = None, "another rank has no kernels or no symmetric memory"
    return peers, reason
