"""Who the ranks of a group are to each other: memory that all of them reach, and lanes in which their work runs.

Terms. A *rank* has a compute lane and a copy lane; a *phase* is a piece of a rank's work that runs in one of them. *Regions* are one
piece of memory per rank that every rank can read and write, with flags that signal between them (`autopar_csrc/include/epoch.h`). An
*epoch* is one use of a region; each rank counts its own, and all begin the same uses in the same order.

The one rule: producers come before those who wait for them. A list of phases keeps it if, carried out phase by phase and in each for all
ranks in turn, no phase waits for a later one. Then it ends with each of the three providers:

    VirtualRanks      all ranks in one process and one thread: phase by phase. On a GPU each rank has two streams of its own
    HostThreads       two threads per rank, which run at once; only the signals order them
    SymmetricMemory   one rank per process, with a GPU each: the peers' memory is mapped into this process

In every provider a copy lane begins after what its rank's compute lane was given before, and the compute lane's work ends after the
copy lane's; so what only this rank uses may be let go after `run`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.lanes import COMPUTE, COPY, Blocks, Lane, Phase, Streams, within

_LOG = logging.getLogger(__name__)
_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Regions:
    """Memory that all ranks reach, in order of the ranks.

    Attributes:
        data: bytes. flags: words, int64, zero at first.
        epochs: how often each rank has used them; of the ranks of other processes it says nothing.
    """

    data: tuple[Tensor, ...]
    flags: tuple[Tensor, ...]
    epochs: list[int]

    def begin(self, rank: int) -> int:
        """The number of this use, from 1."""
        self.epochs[rank] += 1
        return self.epochs[rank]


class Peers(ABC):
    """The ranks of a group, as seen from this process.

    Args:
        blocks: what copies for the overlapped products on a device; None: its copy engine.

    Raises:
        KernelError: for blocks where the device's code does not run.
    """

    def __init__(self, size: int, device: torch.device, blocks: Blocks | None = None) -> None:
        self.size, self.device, self._blocks = size, device, blocks
        self.kind = "host" if device.type == "cpu" else "cuda"
        if blocks is not None and not library.on_device(self.kind):
            raise KernelError("copies by blocks are a device's", remedy="leave blocks out where the ranks are threads of the host")
        self._regions: dict[Hashable, Regions] = {}
        self._lock = threading.Lock()
        self._may_be_refused = library.on_device(self.kind)

    @property
    @abstractmethod
    def ranks(self) -> tuple[int, ...]:
        """Those whose work this process does."""

    @abstractmethod
    def run(self, ranks: Sequence[int], phases: Sequence[Phase]) -> None:
        """Carry out the phases for some of `ranks`; returns when they are done or, on a GPU, enqueued."""

    def move(self, lane: Lane, name: str, *arguments: object) -> None:
        """Call the function of a copy lane: by its name, or as a kernel of blocks."""
        if self._blocks is None:
            lane.call(name, *arguments)
        else:
            lane.call(f"{name}_by_blocks", *arguments, self._blocks.num_blocks, self._blocks.bytes_per_s)

    def regions(self, key: Hashable, num_bytes: int, num_words: int) -> Regions:
        """The regions of this name, made at the first call with `num_bytes` and `num_words` of flags per rank, and kept."""
        with self._lock:
            if key not in self._regions:
                self._regions[key] = self._new_regions(num_bytes, num_words)
            return self._regions[key]

    def _say_refused(self) -> None:
        """Log, once, where signals and waits are no operations of the device's streams."""
        if self._may_be_refused and library.num_refused(self.kind):
            self._may_be_refused = False
            _LOG.warning(
                "the driver takes no signals as operations of a stream: they run as kernels, which wait for a place beside the product, "
                "so that less of the communication is hidden"
            )

    def _new_regions(self, num_bytes: int, num_words: int) -> Regions:
        """Where all ranks are in this process: plain tensors."""
        data = tuple(torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device) for _ in range(self.size))
        flags = tuple(torch.zeros(num_words, dtype=torch.int64, device=self.device) for _ in range(self.size))
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)  # every rank's streams see the zeros
        return Regions(data, flags, [0] * self.size)


class VirtualRanks(Peers):
    """All ranks in this thread: each phase for every rank in turn, so a call needs all ranks' work at once.

    Args:
        pause: called with rank and phase before each; tests slow ranks down with it.
        blocks: as of `Peers`; all ranks' kernels have to find room on the device beside each other.
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
        self._streams = [Streams.new(self.device) for _ in range(size)] if self.kind == "cuda" else []

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def run(self, ranks: Sequence[int], phases: Sequence[Phase]) -> None:
        if tuple(ranks) != self.ranks:
            raise KernelError("virtual ranks work together", remedy="give the work of all ranks in one call, or use HostThreads")
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
    """Ranks that are threads of this process, on the CPU; each has a second thread as its copy lane.

    A rank's thread calls `run` with its own rank; with several ranks `run` starts a thread for each. Close it at the end, or use it
    in a ``with``. Where one rank fails, those who wait for it wait on, but with ``AUTOPAR_KERNELS=debug`` for a limited time.

    Args:
        pause: as of `VirtualRanks`.
    """

    def __init__(self, size: int, pause: Callable[[int, int], None] | None = None) -> None:
        super().__init__(size, torch.device("cpu"))
        self._pause = pause
        self._copies = [ThreadPoolExecutor(1, f"autopar-copy-{rank}") for rank in range(size)]
        self._computes = [ThreadPoolExecutor(1, f"autopar-rank-{rank}") for rank in range(size)]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def run(self, ranks: Sequence[int], phases: Sequence[Phase]) -> None:
        if len(ranks) == 1:
            self._run_one(ranks[0], phases)
        else:
            _results([self._computes[rank].submit(self._run_one, rank, phases) for rank in ranks])

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """`work(rank)` in every rank's thread at once; the results in order of the ranks."""
        return _results([self._computes[rank].submit(work, rank) for rank in self.ranks])

    def close(self) -> None:
        """End the threads."""
        for pool in (*self._computes, *self._copies):
            pool.shutdown()

    def __enter__(self) -> HostThreads:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_one(self, rank: int, phases: Sequence[Phase]) -> None:
        copying = self._copies[rank].submit(self._run_lane, COPY, rank, phases)
        try:
            self._run_lane(COMPUTE, rank, phases)
        finally:
            copying.result()

    def _run_lane(self, name: str, rank: int, phases: Sequence[Phase]) -> None:
        for index, phase in enumerate(phases):
            if phase.lane == name:
                if self._pause is not None:
                    self._pause(rank, index)
                phase.work(Lane("host"), rank)


class SymmetricMemory(Peers):
    """Processes with a GPU each, whose memory torch's symmetric memory maps into one another.

    Making regions is collective: all processes of the group make the same ones in the same order, and wait for each other.
    """

    def __init__(self, name: str, size: int, rank: int, device: torch.device, blocks: Blocks | None = None) -> None:
        super().__init__(size, device, blocks)
        self._name, self._rank = name, rank
        self._copy = torch.cuda.Stream(device, priority=-1)
        self._held: list[object] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self._rank,)

    def run(self, ranks: Sequence[int], phases: Sequence[Phase]) -> None:
        assert tuple(ranks) == self.ranks, f"this process is rank {self._rank}, not {tuple(ranks)}"
        streams = Streams(torch.cuda.current_stream(self.device), self._copy)
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
        data = tuple(handle.get_buffer(rank, (max(num_bytes, 1),), torch.uint8, 0) for rank in range(self.size))
        flags = tuple(handle.get_buffer(rank, (num_words,), torch.int64, begin // 8) for rank in range(self.size))
        return Regions(data, flags, [0] * self.size)


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    """All results; where some failed, the first one's error, after all have ended."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """An array of pointers, as C functions of the host take them."""
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
