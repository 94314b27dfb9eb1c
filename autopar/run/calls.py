"""What a rank does, as others read it: a record of each operation in which all ranks take part."""

from __future__ import annotations

import hashlib
import json
import linecache
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

_LIBRARIES = (
    str(Path(__file__).parents[1]) + "/",
    str(Path(torch.__file__).parent) + "/",
    *(sysconfig.get_path(kind) + "/" for kind in ("stdlib", "purelib", "platlib")),
)
_MOST = 600  # characters of a record: what is beyond these still counts in its digest


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of one rank.

    Attributes:
        number: how many there were, this one included. It is equal on all ranks.
        what: the operation in words, after "rank 1": "runs backward".
        line: the user's line, empty if there is none.
        digest: of `what`, from 0 to 2**32 - 1; equal operations have equal digests.
        stepped: whether an optimizer has stepped since the module's last call; None if this rank
            has nothing to train.
    """

    number: int
    what: str
    line: str
    digest: int
    stepped: bool | None = None

    @classmethod
    def of(cls, number: int, what: str, line: str, stepped: bool | None) -> Call:
        """Make the record of an operation."""
        digest = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=4).digest(), "big")
        return cls(
            number, what if len(what) <= _MOST else f"{what[:_MOST]} …", line, digest, stepped
        )

    @classmethod
    def loads(cls, text: str) -> Call:
        """Read what `dumps` wrote."""
        return cls(*json.loads(text))

    def dumps(self) -> str:
        """Write the record as text."""
        return json.dumps([self.number, self.what, self.line, self.digest, self.stepped])

    def __str__(self) -> str:
        steps = {
            True: " after a step of the optimizer",
            False: " without a step of the optimizer before it",
            None: "",
        }[self.stepped]
        return f"{self.what}{steps}{f' at {self.line}' if self.line else ''}"


def find_line() -> str:
    """Find the line of the user's code that is running.

    Returns:
        ``file.py:12: code`` of the innermost frame outside of libraries, or an empty string.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES) and not file.startswith("<"):
            return f"{file}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Tally:
    """A sum by which ranks see that all of them have come and that their operations are equal.

    Its 62 bits have fields for how many ranks have come, how many of them say that an optimizer has
    stepped, how many that none has, and for the sum of digests, which get the bits that are left.

    Args:
        num_ranks: how many there are.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._bits = num_ranks, num_ranks.bit_length()
        self._digest_bits = max(1, min(32, 62 - 4 * self._bits))

    def packed(self, call: Call) -> int:
        """What one rank adds."""
        fields = (1 << self._bits | (call.stepped is True)) << self._bits | (call.stepped is False)
        return fields << (self._digest_bits + self._bits) | self._digest(call)

    def count(self, total: int) -> int:
        """How many ranks have come."""
        return total >> (self._digest_bits + 3 * self._bits)

    def agrees(self, total: int, call: Call) -> bool:
        """Whether all ranks have added what is equal to `call`."""
        digests = total & ((1 << (self._digest_bits + self._bits)) - 1)
        stepped, not_stepped = (
            total >> (self._digest_bits + n * self._bits) & ((1 << self._bits) - 1) for n in (2, 1)
        )
        return digests == self._num_ranks * self._digest(call) and not (stepped and not_stepped)

    def _digest(self, call: Call) -> int:
        return call.digest & ((1 << self._digest_bits) - 1)
