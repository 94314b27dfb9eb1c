"""Rules found by experiment (`experiments`), for ops that have none.

Experiments are evidence, no proof: a split that is wrong only for values that were not tried would be taken. So ops are left
alone whose schema says that they change operands, draw numbers, or that shapes depend on values.

An op may write beyond its memory when its operands do not belong together (some of torch's own do), so the experiments run in
a child process: what it breaks, nobody needs. If it dies, a second one tries only the splits that should belong together.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autopar.ops.formats import torchs_own
from autopar.rules import discovered
from autopar.rules.call import Call, KeyedCall
from autopar.rules.experiments import experiment
from autopar.rules.notation import AxisOption, replicated

_LONGEST_S = 60.0  # that a child may be silent
_TOO_LONG = '{"options": [], "reason": "experiments with it took too long"}'
_TAGS = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.data_dependent_output: "its result depends on values as no tensor does",
    torch.Tag.dynamic_output_shape: "its result's shape depends on values",
}
_COMMUNICATING = ("_c10d_functional", "c10d", "c10d_functional", "_c10d_functional_autograd", "symm_mem", "_dtensor")


@dataclass(frozen=True, slots=True)
class Discovery:
    """What experiments gave: options, replicate-everything first; where none splits anything, `reason` says why."""

    options: tuple[AxisOption, ...]
    reason: str = ""


def unfit(target: Callable[..., Any]) -> str:
    """Why an op can have no rule; empty where it can."""
    if not isinstance(target, torch._ops.OpOverload):
        return "it is no operator of torch with a schema"
    if target._schema.is_mutable:
        return "it changes its operands"
    if target.namespace in _COMMUNICATING:
        return "it communicates"
    return next((reason for tag, reason in _TAGS.items() if tag in target.tags), "")


def discover(call: Call) -> Discovery:
    """Find the options of a call by experiments on the CPU. Equal calls give equal answers."""
    return _discover(KeyedCall(replace(call, target=torchs_own(call.target))))


@lru_cache(maxsize=4096)
def _discover(keyed: KeyedCall) -> Discovery:
    call = keyed.call
    reason = unfit(call.target) or ("" if call.inputs and call.outputs else "it has no tensors to split")
    options: tuple[AxisOption, ...] = ()
    if not reason:
        known = discovered.load(call)
        text = _in_child(lambda: _question(call, known))
        options, reason = _answer(text or _in_child(lambda: _question(call, known, careful=True)))
        if options and options != known:
            discovered.save(call, options)
    return Discovery((replicated(call), *options), reason)


def _question(call: Call, known: tuple[AxisOption, ...], *, careful: bool = False) -> str:
    options, reason = experiment(call, known, careful=careful)
    return json.dumps({"options": [discovered.encode(option) for option in options], "reason": reason})


def _answer(text: str) -> tuple[tuple[AxisOption, ...], str]:
    try:
        data = json.loads(text)
    except ValueError:
        return (), "experiments with it did not end well"
    return tuple(map(discovered.decode, data["options"])), data["reason"]


def _in_child(work: Callable[[], str]) -> str:
    """The text that `work` gives in a fork of this process; empty where the fork dies, or the system has none."""
    if not hasattr(os, "fork"):
        return ""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: the child uses none of them
        child = os.fork()
    if child == 0:
        _be_child(work, read, write)
    os.close(write)
    pieces = []
    while (ready := select.select([read], [], [], _LONGEST_S)[0]) and (piece := os.read(read, 65536)):
        pieces.append(piece)
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return b"".join(pieces).decode() if ready else _TOO_LONG


def _be_child(work: Callable[[], str], read: int, write: int) -> None:
    """Never returns: nothing of the parent's is cleaned up twice."""
    try:
        import resource  # not on every system

        os.close(read)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what the op says as it dies tells the user nothing
        torch.set_num_threads(1)  # threads do not survive a fork
        text = work().encode()
        while text:
            text = text[os.write(write, text) :]
    finally:
        os._exit(0)
