"""Where a rank's work runs: its compute and its copy lane, which are threads of the host or streams of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autopar.kernels import library

COMPUTE, COPY = "compute", "copy"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where a phase runs: the host, or a stream of a device."""

    kind: str
    stream: torch.cuda.Stream | None = None

    def call(self, name: str, *arguments: object) -> None:
        """Call the kernel's function `name`, without its ``ap_`` and its ``_host`` or ``_cuda``; the stream is added.

        Raises:
            KernelError: where it returns another status than that it is well: in debug builds also where a signal has not come.
        """
        library.step(self.kind, name, None if self.stream is None else self.stream.cuda_stream)(*arguments)


Work = Callable[[Lane, int], None]


@dataclass(frozen=True, slots=True)
class Phase:
    """A piece of a rank's work: `work(lane, rank)`, run in its compute or its copy lane."""

    lane: str
    work: Work


@dataclass(frozen=True, slots=True)
class Blocks:
    """A copy lane that is one kernel of few blocks (`autopar_csrc/include/blocks.h`), in the place of a device's copy engine.

    Attributes:
        num_blocks: each takes a multiprocessor from the products beside it. All uses of a provider's regions have the same number.
        bytes_per_s: at most, of all together; 0: as fast as they can.
    """

    num_blocks: int = 4
    bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Streams:
    """A rank's two lanes on a device. Copies and their signals go first: they are short, and a product beside them can wait."""

    compute: torch.cuda.Stream
    copy: torch.cuda.Stream

    @staticmethod
    def new(device: torch.device) -> Streams:
        return Streams(torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1))

    def fork(self) -> None:
        current = torch.cuda.current_stream(self.compute.device)
        if current != self.compute:
            self.compute.wait_stream(current)
        self.copy.wait_stream(current)

    def lane(self, name: str) -> Lane:
        return Lane("cuda", self.compute if name == COMPUTE else self.copy)

    def join(self) -> None:
        """What is enqueued after it finds both lanes' work done."""
        current = torch.cuda.current_stream(self.compute.device)
        for stream in (self.compute, self.copy):
            if stream != current:
                current.wait_stream(stream)


@contextmanager
def within(lane: Lane) -> Iterator[None]:
    """torch's own kernels go to the lane's stream."""
    if lane.stream is None:
        yield
    else:
        with torch.cuda.stream(lane.stream):
            yield
