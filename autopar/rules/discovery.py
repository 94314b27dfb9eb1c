"""Rules found by experiment (`experiment`), for ops that have none.

Experiments are evidence, not proof: a split that is wrong only for untried values would be
accepted. So ops whose schema shows that they change operands, draw random numbers, or have results
whose shapes depend on values are not tried.

An op may write beyond its memory if its operands do not match (some of torch's own ops do), so the
experiments run in a child process that can crash safely. If it dies, a second one tries only the
splits whose operands are likely to match.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import itertools
import json
import math
import os
import select
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.core.autocast_state import as_written
from autopar.core.json_text import read_json
from autopar.core.layout import Layout, Strategy
from autopar.core.placements import PARTIAL, REPLICATE
from autopar.core.private_folder import (
    cache_home,
    find_foreign,
    is_cache_on,
    private_folder,
    warn_once,
)
from autopar.errors import LayoutError, RuleError
from autopar.ops.formats import torchs_own
from autopar.rules.call import NO_TENSOR, Call, KeyedCall, TensorInfo, op_name
from autopar.rules.expansion import expand
from autopar.rules.notation import AxisOption, exact_cast, replicated_option
from autopar.rules.small_calls import Trial, trials_of
from autopar.rules.trial import check_strategy, close, join, run, split, tolerance_of

# --------------------------------------------------------------------------------------------------
# A cache of discovered rules in a file of the user's cache directory (`cache_home`):
# ``discovered.json``.
#
# Only proposals are stored. They must pass the law again each time they are read, so a file that is
# stale, from another machine or edited by hand can cost choices but never give a wrong rule. The
# file is JSON, not pickle, and holds for one version of torch. ``AUTOPAR_CACHE=0`` in the
# environment disables the cache. A file that is damaged, or that another user can write to, is not
# read; rules are discovered again, and the log has the reason. If the file cannot be written,
# discovered rules are kept in the process.

_FORMAT, _VERSION = "autopar-discovered", 2


def path() -> Path | None:
    """Return the file of the cache, and make its folder. If other users can write to the user's
    folder, a folder of this process is used.

    Returns:
        The file, which may not exist; None if the cache is off, or its folder cannot be made.
    """
    if not is_cache_on("rules"):
        return None
    try:
        folder = private_folder(
            cache_home(),
            "discovered rules",
            "choose a private folder: AUTOPAR_CACHE_DIR=FOLDER",
        )
    except OSError:
        return None
    return folder / "discovered.json"


def load(call: Call) -> tuple[AxisOption, ...]:
    """Return the options of an equal call, without replicate-everything; empty if unknown."""
    try:
        options = tuple(map(decode, _rules(path()).get(_key(call), ())))
    except (LayoutError, TypeError, ValueError, AttributeError) as error:
        warn_once(
            f"an entry of the discovered rules is damaged ({error}): discovering {_key(call)} again"
        )
        return ()
    fit = all(
        len(o.inputs) == len(call.inputs) and len(o.outputs) == len(call.outputs) for o in options
    )
    return options if fit else ()


def save(call: Call, options: Sequence[AxisOption]) -> None:
    """Store the options of a call."""
    file = path()
    if file is None:
        return
    rules = {**_rules(file), _key(call): [encode(option) for option in options]}
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "torch": torch.__version__,
        "rules": rules,
        "sha256": digest(rules),
    }
    with contextlib.suppress(OSError):  # a cache: without the file, rules are discovered again
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as part:
            json.dump(data, part, indent=1, sort_keys=True)
        os.replace(part.name, file)


def encode(option: AxisOption) -> list[list[str]]:
    """Convert an option to JSON."""
    return [[str(Layout((p,))) for p in side] for side in (option.inputs, option.outputs)]


def decode(data: Sequence[Sequence[str]]) -> AxisOption:
    """The inverse of `encode`.

    Raises:
        LayoutError: if a placement cannot be read.
    """
    inputs, outputs = (
        [p for token in side for p in Layout.parse(token).placements] for side in data
    )
    return AxisOption(tuple(inputs), tuple(outputs))


def digest(rules: dict[str, Any]) -> str:
    """Return the checksum of the entries of a file."""
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def _rules(file: Path | None) -> dict[str, Any]:
    """Return the entries of a file; none if it is missing, damaged, or from another version or
    user."""
    if file is None:
        return {}
    try:
        if not (reason := find_foreign(file)):
            return _entries(read_json(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = f"{file} cannot be read: {error}"
    warn_once(f"{reason}. Its rules are discovered again")
    return {}


def _entries(data: Any) -> dict[str, Any]:
    """Return the entries of parsed data; none if they are from another version of autopar or torch.

    Raises:
        ValueError: if the data do not have the form that `save` writes.
    """
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError("it is not a file of discovered rules")
    if (data.get("version"), data.get("torch")) != (_VERSION, torch.__version__):
        return {}
    rules = data.get("rules")
    if not isinstance(rules, dict) or data.get("sha256") != digest(rules):
        raise ValueError("it was changed after it was written")
    return rules


def _key(call: Call) -> str:
    """Return op, schema, settings, shapes and dtypes; equal for equal calls in all processes."""
    text = repr(
        (
            op_name(call.target),
            str(getattr(call.target, "_schema", "")),
            call.args,
            sorted(call.kwargs.items()),
        )
    )
    text += repr([(info.shape, str(info.dtype)) for info in (*call.inputs, *call.outputs)])
    return f"{op_name(call.target)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


# --------------------------------------------------------------------------------------------------
# Experiments on one call: which splits and partial sums of its operands give the whole result.
#
# Every way to split the operands on one axis, and every set of partial sums, is tried once on small
# tensors (`small_calls`). A way is an option if the results of the ranks can be joined to the whole
# by shards, as sums, maxima or minima, or as copies. The option is accepted if it passes the law of
# all rules: on other numbers, on even and uneven parts, and on two axes together with every
# accepted option.
#
# An unknown op may do anything with operands that do not match, so this runs in a child process
# (`_in_child`).

_NUM_PARTS = (2, 3)
_MOST_COMBINATIONS = 4096
_MOST_OPTIONS = 24


def experiment(
    call: Call, known: Sequence[AxisOption] = (), *, careful: bool = False
) -> tuple[tuple[AxisOption, ...], str]:
    """Return the options of a call without replicate-everything, or the reason if none splits it.

    Args:
        call: the call.
        known: options of an earlier experiment. They are the result if all of them pass the law.
        careful: whether to try only the likely splits (`_likely_splits`).
    """
    with as_written(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            0
        )  # of the CPU alone, where it runs: those of GPUs are the script's
        trials = trials_of(call)
        if not trials:
            return (), (
                "on small CPU tensors it returned no finite numbers, or different ones the second"
                " time"
            )
        tells = _tells(trials)
        if not any(tells):
            return (), "its result does not depend on its operands"
        options = _prove_proposals(call, known, trials, tells)
        if not known or len(options) < len(known):
            options = _prove_proposals(call, _proposals(call, trials[0], careful), trials, tells)
    is_split = any(isinstance(p, Shard) for option in options for p in option.inputs)
    return options, "" if is_split else "no sharding of it reproduces the full result"


def _tells(trials: Iterable[Trial]) -> list[bool]:
    """Return, per result, whether its elements differ. A constant result could be a sum, a maximum
    or a copy."""
    results = zip(
        *(run(call.target, call.args, call.kwargs, tensors, (), ()) for call, tensors in trials),
        strict=True,
    )
    return [
        None in of_trials or _varies(torch.cat([r.flatten() for r in of_trials]))
        for of_trials in results
    ]


def _varies(x: torch.Tensor) -> bool:
    return bool((x != x[0]).any()) if x.numel() else False


def _proposals(call: Call, trial: Trial, careful: bool) -> Iterator[AxisOption]:
    """Generate the options that hold on two parts of one trial."""
    small, tensors = trial
    expected, random = (
        run(small.target, small.args, small.kwargs, tensors, (), ()),
        torch.Generator("cpu").manual_seed(0),
    )
    for inputs in (*(_likely_splits(small) if careful else _splits(small)), *_partial_sums(call)):
        layouts = [Layout((p,)) for p in inputs]
        if not all(
            layout.fits(info.shape, (2,))
            for layout, info in zip(layouts, small.inputs, strict=True)
        ):
            continue
        parts = [split(x, layout, (2,), random) for x, layout in zip(tensors, layouts, strict=True)]
        try:
            ranks = [
                run(small.target, small.args, small.kwargs, [p[(rank,)] for p in parts], (), ())
                for rank in range(2)
            ]
        except Exception:  # an unknown op may raise anything: it does not accept these parts
            continue
        given = [PARTIAL] if PARTIAL in inputs else None
        if all(len(r) == len(expected) for r in ranks):
            joins = [
                _joins(list(r), whole, given, tolerance_of(small))
                for whole, *r in zip(expected, *ranks, strict=True)
            ]
            yield from (AxisOption(inputs, outputs) for outputs in itertools.product(*joins))


def _splits(small: Call) -> list[tuple[Placement, ...]]:
    """List all choices of a dim, or none, of every operand. If these are too many, dims of equal
    size are split together."""
    dims = [[Shard(d) for d, size in enumerate(info.shape) if size > 1] for info in small.inputs]
    if math.prod(len(choices) + 1 for choices in dims) > _MOST_COMBINATIONS:
        sizes = sorted({size for info in small.inputs for size in info.shape if size > 1})
        per_size = [
            _product(
                [
                    [p for p in ps if i.shape[p.dim] == s]
                    for ps, i in zip(dims, small.inputs, strict=True)
                ]
            )
            for s in sizes
        ]
        return list(itertools.islice(itertools.chain.from_iterable(per_size), _MOST_COMBINATIONS))
    return list(_product(dims))


def _likely_splits(small: Call) -> list[tuple[Placement, ...]]:
    """List the dims that have equal sizes in all operands, counted from the front or from the
    back."""
    found: dict[tuple[Placement, ...], None] = {}
    shapes = [info.shape for info in small.inputs]
    for d, size in {
        (d, s)
        for shape in shapes
        for front, s in enumerate(shape)
        for d in (front, front - len(shape))
        if s > 1
    }:
        has = [-len(shape) <= d < len(shape) and shape[d] == size for shape in shapes]
        found[
            tuple(
                Shard(d % len(shape)) if ok else REPLICATE
                for ok, shape in zip(has, shapes, strict=True)
            )
        ] = None
    return sorted(found, key=str)


def _product(dims: Sequence[Sequence[Shard]]) -> Iterator[tuple[Placement, ...]]:
    return (
        c
        for c in itertools.product(*((REPLICATE, *choices) for choices in dims))
        if any(isinstance(p, Shard) for p in c)
    )


def _partial_sums(call: Call) -> list[tuple[Placement, ...]]:
    """List sets of operands that may be partial sums: their cast to the results rounds nothing."""
    results = [info for info in call.outputs if info != NO_TENSOR]
    able = [
        i
        for i, info in enumerate(call.inputs)
        if _adds(info) and all(exact_cast(info.dtype, out.dtype) for out in results)
    ]
    sizes = range(1, len(able) + 1) if len(able) <= 4 else (1, len(able))
    sets = [s for n in sizes for s in itertools.combinations(able, n)]
    return [tuple(PARTIAL if i in s else REPLICATE for i in range(len(call.inputs))) for s in sets]


def _adds(info: TensorInfo) -> bool:
    return info.dtype.is_floating_point or info.dtype.is_complex


def _joins(
    parts: list[torch.Tensor],
    whole: torch.Tensor | None,
    given: Sequence[Placement] | None,
    tolerance: float,
) -> list[Placement]:
    """List the placements that join the results of two ranks to the whole. With `given`, only these
    are tried."""
    if whole is None:
        return [REPLICATE]
    shards = [Shard(d) for d, size in enumerate(whole.shape) if size > 1]
    sums = (
        []
        if whole.dtype == torch.bool
        else [PARTIAL]
        if whole.is_complex()
        else [PARTIAL, Partial("max"), Partial("min")]
    )
    return [p for p in given or (REPLICATE, *shards, *sums) if _makes(parts, whole, p, tolerance)]


def _makes(
    parts: list[torch.Tensor], whole: torch.Tensor, placement: Placement, tolerance: float
) -> bool:
    layout = Layout((placement,))
    if not isinstance(placement, Shard) and any(p.shape != whole.shape for p in parts):
        return False
    if not layout.fits(whole.shape, (2,)):
        return False
    joined = join(
        {(rank,): part for rank, part in enumerate(parts)}, whole, layout, (2,), tolerance
    )
    return not isinstance(joined, str) and close(joined, whole, tolerance)


def _prove_proposals(
    call: Call, proposals: Iterable[AxisOption], trials: Sequence[Trial], tells: Sequence[bool]
) -> tuple[AxisOption, ...]:
    """List the proposals that pass the law; the first one for each split of operands. A constant
    result must be split, which its shape shows."""
    kept: dict[tuple[Placement, ...], AxisOption] = {
        replicated_option(call).inputs: replicated_option(call)
    }
    for option in proposals:
        is_new = option.inputs not in kept and len(kept) < _MOST_OPTIONS
        shows = all(
            told or isinstance(p, Shard) for told, p in zip(tells, option.outputs, strict=True)
        )
        if is_new and shows and _holds(option, trials) and _agrees(option, kept, trials[0]):
            kept[option.inputs] = option
    return tuple(kept.values())[1:]


def _holds(option: AxisOption, trials: Sequence[Trial]) -> bool:
    """Whether an option passes the law on one axis in every trial that it fits, and there is such
    a trial."""
    strategies = [
        (trial, s, n)
        for trial in trials
        for n in _NUM_PARTS
        for s in expand(trial[0], (replicated_option(trial[0]), option), (n,))[1:]
    ]
    return bool(strategies) and all(
        _obeys(trial, strategy, (n,)) for trial, strategy, n in strategies
    )


def _agrees(
    option: AxisOption, kept: dict[tuple[Placement, ...], AxisOption], trial: Trial
) -> bool:
    """Whether it also obeys the law together with the options kept, on two axes."""
    before = set(expand(trial[0], tuple(kept.values()), (2, 2)))
    added = [s for s in expand(trial[0], (*kept.values(), option), (2, 2)) if s not in before]
    return all(_obeys(trial, strategy, (2, 2)) for strategy in added)


def _obeys(trial: Trial, strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    try:
        check_strategy(*trial, strategy, mesh_shape)
    except RuleError:
        return False
    return True


_LONGEST_S = 60.0  # seconds without output after which a child is stopped
_TOO_LONG = '{"options": [], "reason": "experiments with it took too long"}'
_TAGS = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.data_dependent_output: "its result depends on the values of tensors",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on values",
}
_COMMUNICATING = (
    "_c10d_functional",
    "c10d",
    "c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
    "_dtensor",
)


@dataclass(frozen=True, slots=True)
class Discovery:
    """The result of experiments: options, replicate-everything first. If none splits anything,
    `reason` is the reason."""

    options: tuple[AxisOption, ...]
    reason: str = ""


def unfit(target: Callable[..., Any]) -> str:
    """Return why an op can have no rule; empty if it can."""
    if not isinstance(target, torch._ops.OpOverload):
        return "it is not a torch operator with a schema"
    if target._schema.is_mutable:
        return "it modifies its operands"
    if target.namespace in _COMMUNICATING:
        return "it communicates"
    return next((reason for tag, reason in _TAGS.items() if tag in target.tags), "")


def discover(call: Call) -> Discovery:
    """Find the options of a call by experiments on the CPU. Equal calls give equal answers."""
    return _discover(KeyedCall(replace(call, target=torchs_own(call.target))))


@lru_cache(maxsize=4096)
def _discover(keyed: KeyedCall) -> Discovery:
    call = keyed.call
    reason = unfit(call.target) or (
        "" if call.inputs and call.outputs else "it has no tensors to shard"
    )
    options: tuple[AxisOption, ...] = ()
    if not reason:
        known = load(call)
        text = _in_child(lambda: _question(call, known))
        options, reason = _answer(text or _in_child(lambda: _question(call, known, careful=True)))
        if options and options != known:
            save(call, options)
    return Discovery((replicated_option(call), *options), reason)


def _question(call: Call, known: tuple[AxisOption, ...], *, careful: bool = False) -> str:
    options, reason = experiment(call, known, careful=careful)
    return json.dumps({"options": [encode(option) for option in options], "reason": reason})


def _answer(text: str) -> tuple[tuple[AxisOption, ...], str]:
    try:
        data = json.loads(text)
    except ValueError:
        return (), "experiments with it failed"
    return tuple(map(decode, data["options"])), data["reason"]


def _in_child(work: Callable[[], str]) -> str:
    """Return the text that `work` returns in a fork of this process; empty if the fork dies, or the
    system cannot fork."""
    if not hasattr(os, "fork"):
        return ""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forks of processes with threads: the child uses no threads
        child = os.fork()
    if child == 0:
        _be_child(work, read, write)
    os.close(write)
    pieces = []
    while (ready := select.select([read], [], [], _LONGEST_S)[0]) and (
        piece := os.read(read, 65536)
    ):
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
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), 2
        )  # what the op says as it dies tells the user nothing
        torch.set_num_threads(1)  # threads do not survive a fork
        text = work().encode()
        while text:
            text = text[os.write(write, text) :]
    finally:
        os._exit(0)
