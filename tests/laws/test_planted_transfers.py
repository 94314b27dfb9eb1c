"""Faults planted in transfers between ranks: transfers of stages, rows of experts, and copies to
and from hosts. Validation refuses each of them, except those that only the numbers of `verify`
reveal.

Each row breaks one thing at one place, for all numbers: a rank receives another tensor, another
shape, or reads a tensor before it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_edits import between, changed, dropped, exchanged, reading, repeated, without
from planted_faults import Fault, Patch, refused_by_validation, sound
from planted_subjects import SUBJECTS

from autopar.errors import VerificationError
from autopar.kernels import collectives
from autopar.ops import expert_layers
from autopar.program import transfers
from autopar.program import transfers as interleaving
from autopar.program.schedule import Action
from autopar.program.stage_work import StageWork
from autopar.program.transfers import ForwardsFirst, Interleaving, _Chunk

aten = torch.ops.aten
Actions = list[Action]
_interleaved, _peer, _act, _begin = (
    interleaving.interleaved_schedule,
    transfers.peer,
    _Chunk.act,
    Interleaving.__init__,
)
_each, _leaving = ForwardsFirst._each, StageWork.leaving_outputs


def order_of_rank(rank: int, change: Callable[[Actions], Any]) -> Callable[[Patch], Any]:
    """Change the order of the actions of one rank."""

    def changed_order(*sizes: int) -> tuple[tuple[Action, ...], ...]:
        lists = [list(actions) for actions in _interleaved(*sizes)]
        change(lists[rank])
        return tuple(map(tuple, lists))

    return lambda patch: patch.setattr(interleaving, "interleaved_schedule", changed_order)


def places(actions: Actions, kind: str) -> list[int]:
    return [place for place, action in enumerate(actions) if action.kind == kind]


def first_two_of(kind: str) -> Callable[[Actions], Any]:
    """Exchange the first two actions of a kind."""

    def change(actions: Actions) -> None:
        one, other = places(actions, kind)[:2]
        actions[one], actions[other] = actions[other], actions[one]

    return change


def other_microbatches(actions: Actions) -> None:
    """Exchange the microbatches of the first two sends."""
    one, other = places(actions, "send forward")[:2]
    first, second = actions[one], actions[other]
    assert first.stage == second.stage
    actions[one] = first._replace(microbatch=second.microbatch)
    actions[other] = second._replace(microbatch=first.microbatch)


def send_late(actions: Actions) -> None:
    """Send to a rank only after the first receive from it."""
    come = places(actions, "receive backward")[0]
    sent = next(p for p in reversed(places(actions, "send forward")) if p < come)
    actions.insert(come, actions.pop(sent))


def peer_of(kinds: tuple[str, ...], to: Callable[[int], int]) -> Callable[[Patch], Any]:
    """Give transfers of these kinds another peer."""

    def peer(kind: str, stage: int) -> int:
        return to(stage) if kind in kinds else _peer(kind, stage)

    return lambda patch: patch.setattr(transfers, "peer", peer)


def without_waiting(self: Any, kind: str, microbatch: int) -> Iterator[Any]:
    """Compute without waiting for received tensors."""
    for waits in _act(self, kind, microbatch):
        yield [] if kind in ("forward", "backward") else waits


def chunks_exchanged(self: Interleaving, works: Mapping[int, StageWork], of: Any, num: int) -> None:
    _begin(self, dict(zip(works, reversed(works.values()), strict=True)), of, num)


def runs_at_once(self: ForwardsFirst, *how: Any) -> Iterator[Any]:
    """Run without waiting for transfers."""
    for place, waits in enumerate(_each(self, *how)):
        yield waits if place % 2 else []


def last_left(self: ForwardsFirst, *how: Any) -> Iterator[Any]:
    """Do not wait for the last send."""
    for place, waits in enumerate(_each(self, *how)):
        yield waits if place < 2 * self._num else []


INTERLEAVED = {
    "stages send to the stage before": Fault(
        "interleaved",
        "ranks wait for each other|reads .*, expected",
        plant=peer_of(("send forward",), lambda stage: stage - 1),
    ),
    "stages receive from the stage behind": Fault(
        "interleaved",
        "ranks wait for each other|reads .*, expected",
        plant=peer_of(("receive forward",), lambda stage: stage + 1),
    ),
    "gradients go to the stage behind": Fault(
        "interleaved",
        "ranks wait for each other|reads .*, expected",
        plant=peer_of(("send backward",), lambda stage: stage + 1),
    ),
    "a rank's stages change places": Fault(
        "interleaved",
        "ranks wait for each other|reads .*, expected|it takes|before its operands",
        plant=lambda p: p.setattr(Interleaving, "__init__", chunks_exchanged),
    ),
    "two receives change places": Fault(
        "interleaved",
        "forward reads|forward runs before",
        plant=order_of_rank(1, first_two_of("receive forward")),
    ),
    "two sends are of each other's microbatches": Fault(
        "interleaved", "it takes|forward reads", plant=order_of_rank(0, other_microbatches)
    ),
    "two gradients are received in each other's place": Fault(
        "interleaved",
        "backward reads|backward runs before",
        plant=order_of_rank(0, first_two_of("receive backward")),
    ),
    "a send is started behind a receive": Fault(
        "interleaved",
        "ranks wait for each other",
        plant=order_of_rank(1, send_late),
    ),
    "a send is left out": Fault(
        "interleaved",
        "ranks wait for each other|reads .*, expected",
        plant=order_of_rank(0, lambda actions: actions.pop(places(actions, "send forward")[0])),
    ),
    "a stage computes before what it reads is there": Fault(
        "interleaved",
        "forward reads nothing",
        plant=lambda p: p.setattr(_Chunk, "act", without_waiting),
    ),
    "a step ends before what was sent is gone": Fault(
        "interleaved",
        "does not wait for send",
        plant=lambda p: p.setattr(_Chunk, "close", lambda self: iter(())),
    ),
    "a stage sends before it has sent the last": Fault(
        "interleaved",
        "does not wait for send",
        plant=lambda p: p.setattr(_Chunk, "_finish_sending", lambda self, phase: iter(())),
    ),
    "values are sent in another order": Fault(
        "interleaved",
        "forward reads .*, expected",
        plant=lambda p: p.setattr(
            StageWork, "leaving_outputs", lambda self, number: _leaving(self, number)[::-1]
        ),
    ),
}

ONE_STAGE_A_RANK = {
    "a stage sends to the one before": Fault(
        "stages", "ranks wait for each other", plant=peer_of(("send forward",), lambda s: s - 1)
    ),
    "a gradient is received from the stage before": Fault(
        "stages", "ranks wait for each other", plant=peer_of(("receive backward",), lambda s: s - 1)
    ),
    "of two halves, a stage runs before its values come": Fault(
        "without loss",
        "forward reads nothing",
        plant=lambda p: p.setattr(ForwardsFirst, "_each", runs_at_once),
    ),
    "of two halves, the last send is left": Fault(
        "without loss",
        "does not wait for send",
        plant=lambda p: p.setattr(ForwardsFirst, "_each", last_left),
    ),
    "of two halves, one stage begins with the last microbatch": Fault(
        "without loss",
        "forward runs before",
        plant=lambda p: p.setattr(
            ForwardsFirst,
            "_each",
            lambda self, phase, arriving, run, leaving: (
                _each(self, phase, arriving, lambda n: run(self._num - 1 - n), leaving)
                if self._number == 1
                else _each(self, phase, arriving, run, leaving)
            ),
        ),
    ),
}

EXPERTS = {
    "there are more experts": Fault(
        "dispatched", "argument 6 is 8, expected 4", changed("experts", arg_6=8)
    ),
    "every rank has the first experts": Fault(
        "dispatched", "argument 7 is", changed("experts", arg_7=(4, ()))
    ),
    "rows have no room": Fault(
        "dispatched", "argument 8 is 24, expected 48", changed("experts", arg_8=24)
    ),
    "gradients of rows have no room": Fault(
        "dispatched", "argument 8 is", changed("experts_backward", "backward", arg_8=24)
    ),
    "experts compute otherwise": Fault(
        "dispatched", "argument 5 is gelu", changed("experts", arg_5="gelu")
    ),
    "rows go along another axis": Fault(
        "dispatched", "argument 9 is 1", changed("experts", arg_9=1)
    ),
    "the two linears of experts change places": Fault(
        "dispatched",
        "operand",
        changed("experts", arg_3=lambda n: n.args[4], arg_4=lambda n: n.args[3]),
    ),
    "backward dispatches results for tokens": Fault(
        "dispatched",
        "operand",
        changed("experts_backward", "backward", arg_1=lambda n: n.args[0]),
    ),
    "gathered tokens meet the first experts on every rank": Fault(
        "gathered", "argument start is missing", without("experts.default", "start")
    ),
    "picks are gathered along another dim": Fault(
        "gathered", "is not possible from", changed("all_gather", at=1, arg_1=1)
    ),
    "picks are those of a rank alone": Fault("gathered", "operand 1", dropped("all_gather", at=1)),
    "gates are gathered for picks": Fault(
        "gathered", "operand", changed("experts.default", arg_1=lambda n: n.args[2])
    ),
    "results of other ranks' experts are left out": Fault(
        "gathered",
        "is not possible from",
        changed("reduce_scatter", target=collectives.shard, args=lambda n: (n.args[0], 0, 0)),
    ),
    "gradients of tokens are those of a rank's experts": Fault(
        "gathered",
        "is not possible from",
        changed(
            "reduce_scatter", "backward", target=collectives.shard, args=lambda n: (n.args[0], 0, 0)
        ),
    ),
}

FP32 = {"dtype": torch.float32}
HOSTS = {
    "a parameter is read where it rests": Fault("hosted", "host", dropped("fetch")),
    "a gradient stays on the device": Fault(
        "hosted", "the gradient of .* expected .* host", dropped("store", "backward")
    ),
    "a parameter is fetched twice": Fault("hosted", "is not possible from", repeated("fetch")),
    "a gradient is stored twice": Fault(
        "hosted", "is not possible from", repeated("store", "backward")
    ),
    "another parameter is fetched": Fault(
        "hosted", "operand|bucket|pack", reading("fetch", "forward", 0, of=2)
    ),
    "two gradients are stored in each other's place": Fault(
        "hosted", "the gradient of", exchanged("store", "backward", (0, 1))
    ),
    "a gradient is stored in float32": Fault(
        "hosted",
        "the gradient of .* expected",
        between("store", "backward", [(aten._to_copy.default, FP32)]),
    ),
    "backward fetches a value of another layer": Fault(
        "waiting", "operand", exchanged("fetch", "backward", (0, 2))
    ),
    "backward reads what is on the host": Fault("waiting", "host", dropped("fetch", "backward")),
    "a copy is read before it is done": Fault(
        "waiting", "its operand is not a tensor", dropped("finish", at=1)
    ),
    "a copy to the host ends as another step": Fault(
        "waiting", "not started with these settings", changed("finish", at=1, arg_1="fetch")
    ),
    "a host's copy is of what was before": Fault(
        "waiting",
        "operand|saved",
        changed("start", at=2, arg_0=lambda n: n.args[0].all_input_nodes[0]),
    ),
}

FAULTS = {**INTERLEAVED, **ONE_STAGE_A_RANK, **EXPERTS, **HOSTS}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_of_a_transfer_is_refused_by_validation(
    name: str, monkeypatch: Patch
) -> None:
    refused_by_validation(FAULTS[name], monkeypatch)


_routes, _add_up = expert_layers._routes, expert_layers.add_up
_count = expert_layers.Together.count


def fewer(*given: Any) -> Any:
    """Drop the last pair of each rank, as with a capacity that is too small by one."""
    return [
        replace(way, order=way.order[:-1], tokens=torch.cat((way.tokens[1:], way.tokens[:1])))
        for way in _routes(*given)
    ]


def turned(*given: Any) -> Any:
    """Shift the rows by one pair."""
    return [replace(way, tokens=way.tokens.roll(1)) for way in _routes(*given)]


def of_other_experts(self: Any, counts: Any, num_pairs: Any) -> Any:
    """Let a rank take the rows of its experts in another order."""
    return [
        replace(each, coming=tuple(by_expert[::-1] for by_expert in each.coming))
        for each in _count(self, counts, num_pairs)
    ]


def back_as_they_came(self: Any, what: Any, rows: Any, traffic: Any) -> Any:
    """Return rows with the sizes of the send instead of the receive."""
    return self._rows(rows, [each.leaving for each in traffic])


RUNS: dict[str, Callable[[Patch], Any]] = {
    "rows are of another pair's token": lambda p: p.setattr(expert_layers, "_routes", turned),
    "a rank drops its last pair": lambda p: p.setattr(
        expert_layers,
        "add_up",
        lambda rows, order, *a: _add_up(rows[:-1], order[:-1], *a),
    ),
    "rows are of the experts in another order": lambda p: p.setattr(
        expert_layers.Together, "count", of_other_experts
    ),
    "rows go back by the sizes with which they left": lambda p: p.setattr(
        expert_layers.Together, "send_back", back_as_they_came
    ),
    "gates are left out": lambda p: p.setattr(
        expert_layers,
        "add_up",
        lambda rows, order, t, k, gates: _add_up(rows, order, t, k, None),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_planted_fault_of_a_transfer_is_detected_by_verify(name: str, monkeypatch: Patch) -> None:
    subject = SUBJECTS["dispatched"]
    sound("dispatched")
    with monkeypatch.context() as patch:
        RUNS[name](patch)
        with pytest.raises(VerificationError):
            subject.verify(subject.emit())
