"""What ranks that differ are told: which of them differ, what each did, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopar.errors import RankError
from autopar.run.calls import Call
from autopar.run.ends import End

_MOST_SHOWN = 4
_ALIKE = (
    "call the model, backward, optimizer.step(), save and load in the same order and equally often "
    "on every rank, with batches of the same shapes and dtypes: also at the end of an epoch "
    "(drop_last=True), and to evaluate or to save"
)


def _unlike(what: str, ranks: Sequence[int] = ()) -> RankError:
    """The error of ranks that do different things."""
    return RankError(what, remedy=_ALIKE, ranks=ranks)


class Differences:
    """Of the ranks of a process group, as this one tells of them.

    Args:
        rank, num_ranks: this one and how many there are.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._last: Call | None = None
        self._followed: set[tuple[int, int, bool | None]] = set()

    def follow(self, call: Call) -> None:
        """Note an operation in which all ranks agreed: after the one before it is expected."""
        self._followed.add(self._step(call))
        self._last = call

    def of(
        self, calls: Mapping[int, Call], ended: Mapping[int, End], own: Call, limit_s: float
    ) -> RankError:
        """The error of ranks that do not agree.

        Args:
            calls: the last operation of each rank that has one.
            ended: the ranks whose processes have ended.
            own: this rank's operation. limit_s: for how long a rank may wait.
        """
        here = {rank: call for rank, call in calls.items() if call.number == own.number}
        groups = self._groups(here)
        if len(groups) > 1 and (len(here) == self._num_ranks or not ended):
            return self._of_groups(groups, here)
        if ended:
            return self.of_ended(ended, own)
        late = [rank for rank in range(self._num_ranks) if rank not in here]
        late = late or [self._rank]  # the others have given up before this one came
        did = f"rank {self._rank} {own}{self._last_of(late, calls)}"
        what = f"{_ranks(late)} did not come within {limit_s:g} s: {did}"
        remedy = (
            "see what it does there; if it needs longer, call "
            "torch.distributed.init_process_group(timeout=...) before autopar.compile"
        )
        return RankError(what, remedy=remedy, ranks=late)

    def of_ended(self, ended: Mapping[int, End], own: Call) -> RankError:
        """The error where processes have ended; arguments as of `of`."""
        (first, end), *_ = ended.items()
        more = (
            f", as did {_ranks([rank for rank in ended if rank != first])}"
            if len(ended) > 1
            else ""
        )
        what = (
            f"rank {first} has ended: {end.why}{more}; rank {self._rank} {own}{self._before(own)}"
        )
        remedy = (
            _ALIKE
            if end.kind == "quiet"
            else f"see the messages of rank {first}; the other ranks cannot go on without it"
        )
        return RankError(what, remedy=remedy, ranks=list(ended))

    def left(self, waiting: Sequence[int], own: Call) -> str:
        """That others fail because this rank ends, after `own`."""
        fail = "fails" if len(waiting) == 1 else "fail"
        return f"rank {self._rank} ends, and {_ranks(waiting)} {fail} without it; last it {own}"

    def waiting(self, calls: Mapping[int, Call], own: Call, waited_s: float, limit_s: float) -> str:
        """That this rank waits, and for whom; arguments as of `of`."""
        late = [
            rank
            for rank in range(self._num_ranks)
            if rank not in calls or calls[rank].number < own.number
        ]
        waits = f"rank {self._rank} has waited {waited_s:.0f} s for {_ranks(late)}"
        return f"{waits}, of at most {limit_s:.0f} s: it {own}{self._last_of(late, calls)}"

    def _of_groups(self, groups: Sequence[Sequence[int]], calls: Mapping[int, Call]) -> RankError:
        others = self._others(groups, calls)
        before = self._before(calls[groups[0][0]])
        if not others:
            shown = "; ".join(
                f"{_ranks(ranks)} {calls[ranks[0]]}" for ranks in groups[:_MOST_SHOWN]
            )
            return _unlike(f"ranks do different things: {shown}{before}")
        first = next(ranks[0] for ranks in groups if ranks[0] not in others)
        shown = "; ".join(
            f"{_ranks(ranks)} {calls[ranks[0]]}"
            for ranks in groups[:_MOST_SHOWN]
            if ranks[0] in others
        )
        than = f"rank {first}" if self._num_ranks == 2 else "the others"
        does = "does something" if len(others) == 1 else "do something"
        what = f"{_ranks(others)} {does} else than {than}: {shown}; rank {first} {calls[first]}"
        return _unlike(f"{what}{before}", others)

    def _groups(self, calls: Mapping[int, Call]) -> list[list[int]]:
        """Ranks that do the same, the largest group first."""
        digests = {call.digest for call in calls.values()}
        found: dict[object, list[int]] = {}
        for rank, call in sorted(calls.items()):
            key = call.digest if len(digests) > 1 else call.stepped
            if key is not None:  # with nothing to train, a rank differs from none by its steps
                found.setdefault(key, []).append(rank)
        return sorted(found.values(), key=lambda ranks: -len(ranks))

    def _others(self, groups: Sequence[Sequence[int]], calls: Mapping[int, Call]) -> list[int]:
        """The ranks that differ from most, else from what is expected; none if neither tells."""
        num_ranks = sum(map(len, groups))
        if 2 * len(groups[0]) > num_ranks:
            return sorted(rank for ranks in groups[1:] for rank in ranks)
        strange = [
            rank
            for ranks in groups
            for rank in ranks
            if self._step(calls[rank]) not in self._followed
        ]
        return sorted(strange) if len(strange) < num_ranks else []

    def _step(self, call: Call) -> tuple[int, int, bool | None]:
        return (0 if self._last is None else self._last.digest, call.digest, call.stepped)

    def _before(self, own: Call) -> str:
        alike = self._last is not None and self._last.number < own.number
        return (
            f"; until then all ranks did the same, the last time where each {self._last.what}"
            if alike and self._last
            else ""
        )

    def _last_of(self, late: Iterable[int], calls: Mapping[int, Call]) -> str:
        others = [rank for rank in late if rank in calls and rank != self._rank]
        said = [f"rank {rank}: {calls[rank]}" for rank in others[:_MOST_SHOWN]]
        return f"; the last of {', of '.join(said)}" if said else ""


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
