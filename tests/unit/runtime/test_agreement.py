"""Ranks agree on each operation. In these tests, threads that share a store represent ranks."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime import rank_agreement, rank_differences
from autopar.runtime.rank_agreement import Agreement
from autopar.runtime.rank_differences import End, RankCall, Tally, find_line

Told = dict[int, RankError]


class Ranks:
    """The agreements of several ranks that share one store."""

    def __init__(self, num: int, limit_s: float = 60.0) -> None:
        self.store = dist.HashStore()
        self.each = [Agreement(self.store, rank, num, limit_s) for rank in range(num)]

    def run(self, action: Callable[[int, Agreement], None]) -> Told:
        """Run `action` on all ranks concurrently. Return the errors by rank."""
        told: Told = {}

        def one(rank: int) -> None:
            try:
                action(rank, self.each[rank])
            except RankError as error:
                told[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.each))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


def steps(rank: int, each: Agreement) -> None:
    """Run two training steps."""
    for _ in range(2):
        each.begin("calls the model", True)
        each.begin("runs backward")


def test_ranks_with_equal_operations_pass_and_the_store_does_not_grow() -> None:
    ranks = Ranks(3)
    assert not ranks.run(steps)
    after_two = ranks.store.num_keys()
    for _ in range(10):
        assert not ranks.run(steps)
    few = 3 * 8  # the records of each rank stay and are overwritten
    assert ranks.store.num_keys() <= after_two + few


def test_of_two_ranks_the_one_that_departs_from_the_earlier_sequence_is_named() -> None:
    ranks = Ranks(2)
    assert not ranks.run(steps)
    told = ranks.run(lambda rank, each: each.begin("saves" if rank else "calls the model", True))
    assert {rank: error.ranks for rank, error in told.items()} == {0: (1,), 1: (1,)}
    assert told[0].what == told[1].what
    assert "rank 1 does something else than rank 0: rank 1 saves" in told[0].what


def test_of_two_ranks_without_an_earlier_sequence_neither_is_blamed() -> None:
    told = Ranks(2).run(lambda rank, each: each.begin("saves" if rank else "loads"))
    assert len(told) == 2 and all(error.ranks == () for error in told.values())
    assert (
        "ranks do different things: rank 0 loads" in told[0].what and "rank 1 saves" in told[0].what
    )


def test_ranks_that_differ_from_the_majority_are_named() -> None:
    told = Ranks(5).run(lambda rank, each: each.begin("saves" if rank in (1, 4) else "loads"))
    assert all(error.ranks == (1, 4) for error in told.values()) and len(told) == 5
    assert "ranks [1, 4] do something else than the others" in told[0].what


def test_a_rank_that_skips_an_optimizer_step_is_named() -> None:
    stepped = [True, None, False, True]
    told = Ranks(4).run(lambda rank, each: each.begin("calls the model", stepped[rank]))
    assert all(error.ranks == (2,) for error in told.values()) and len(told) == 4
    assert "rank 2 calls the model without a step of the optimizer before it" in told[0].what


def test_ranks_continue_together_after_an_error() -> None:
    ranks = Ranks(2)
    assert len(ranks.run(lambda rank, each: each.begin("saves" if rank else "loads"))) == 2
    assert not ranks.run(steps)


def test_a_rank_that_times_out_is_named_with_its_last_operation() -> None:
    ranks = Ranks(2, limit_s=0.5)
    assert not ranks.run(steps)
    told = ranks.run(lambda rank, each: None if rank else each.begin("calls the model", True))
    assert told[0].ranks == (1,)
    assert "rank 1 did not arrive within 0.5 s" in told[0].what
    assert "the last operation of rank 1: runs backward" in told[0].what
    assert "timeout" in told[0].remedy
    told = ranks.run(lambda rank, each: each.begin("calls the model", True) if rank else None)
    assert told[1].ranks == (1,), "it arrives later and does not continue alone"


def test_a_waiting_rank_logs_once_which_ranks_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_agreement, "TELL_AFTER_S", 0.1)
    monkeypatch.setattr(rank_agreement, "_LOOK_EACH_S", 0.05)
    ranks, here = Ranks(3), threading.Event()
    caplog.set_level(logging.WARNING, "autopar")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            here.set()

    handler = Handler()
    logging.getLogger("autopar").addHandler(handler)
    try:

        def late(rank: int, each: Agreement) -> None:
            if rank == 2:
                assert here.wait(60.0)
            each.begin("calls the model")

        assert not ranks.run(late)
    finally:
        logging.getLogger("autopar").removeHandler(handler)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "for rank" in said and "2" in said and "of at most 60 s: it calls the model" in said


def test_a_rank_that_is_interrupted_while_waiting_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks, interrupted = Ranks(2), threading.Event()

    def interrupt(key: str, within_s: float) -> None:
        raise KeyboardInterrupt

    def one(rank: int, each: Agreement) -> None:
        if rank == 0:
            monkeypatch.setattr(each._waiter, "answer", interrupt)
            with pytest.raises(KeyboardInterrupt):
                each.begin("calls the model")
            interrupted.set()
        else:
            assert interrupted.wait(60.0)
            each.begin("calls the model")

    told = ranks.run(one)
    assert set(told) == {1} and "rank 0 was interrupted by KeyboardInterrupt" in told[1].what


@pytest.mark.parametrize("kind", ["alone", "quiet"])
def test_the_error_on_other_ranks_says_how_a_rank_ended(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(3)
    assert not ranks.run(steps)
    monkeypatch.setattr(
        rank_agreement, "why_it_ends", lambda: End("it raised ValueError: no", kind)
    )

    def one(rank: int, each: Agreement) -> None:
        if rank == 1:
            each.close()
        else:
            each.begin("calls the model", True)

    told = ranks.run(one)
    assert set(told) == {0, 2} and all(error.ranks == (1,) for error in told.values())
    assert "rank 1 has ended: it raised ValueError: no; rank 0 calls the model" in told[0].what


def test_the_rank_that_failed_first_is_named_and_not_those_that_failed_because_of_it() -> None:
    store = dist.HashStore()
    each = [rank_differences.Ends(store, rank, 3) for rank in range(3)]
    each[0].record(End("it raised RankError: rank 1 has ended", "after"))
    assert set(each[2].find()) == {0}
    each[1].record(End("it raised ValueError", "alone"))
    assert set(each[2].find()) == {1}


@pytest.mark.skipif(sys.platform != "linux", reason="of /proc")
def test_a_dead_process_has_ended_even_if_its_pid_is_reused() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here, _, started = rank_differences._identity()
        state, its_start = rank_differences._state(child.pid)
        identity = (here, str(child.pid), its_start)
        assert state not in "ZX" and rank_differences._is_running(identity)
        assert not rank_differences._is_running((here, str(child.pid), started + "0"))
        assert rank_differences._is_running(("another machine", str(child.pid), "0"))
        child.kill()
        while rank_differences._state(child.pid)[0] != "Z":  # until it is a zombie process
            pass
        assert not rank_differences._is_running(identity)
    assert not rank_differences._is_running(identity)


@pytest.mark.parametrize("num", [2, 3, 7, 64, 1000, 5000])
def test_a_tally_counts_the_arrived_ranks_and_detects_different_calls(num: int) -> None:
    tally, draw = Tally(num), random.Random(num)
    call = RankCall.of(1, f"calls model {draw.random()}", "", True)
    same = [tally.pack(call)] * num
    for come in (1, num - 1, num):
        assert tally.count(sum(same[:come])) == come
    assert tally.agrees(sum(same), call) and sum(same) < 2**62
    idle = tally.pack(RankCall.of(1, call.what, "", None))
    assert tally.agrees(sum(same[1:]) + idle, call), (
        "a rank with nothing to train differs from none"
    )
    skipped = tally.pack(RankCall.of(1, call.what, "", False))
    assert not tally.agrees(sum(same[1:]) + skipped, call)
    other = tally.pack(RankCall.of(1, "saves", "", True))
    total = sum(same[1:]) + other
    assert tally.count(total) == num and not tally.agrees(total, call)


def test_a_record_round_trips_and_names_the_line_of_the_user() -> None:
    call = RankCall.of(7, "calls " + "x" * 1000, find_line(), None)
    assert RankCall.loads(call.dumps()) == call and len(json.loads(call.dumps())[1]) < 700
    assert "test_agreement.py:" in call.line and "find_line()" in call.line
    assert RankCall.of(7, "calls " + "x" * 1001, "", None).digest != call.digest
