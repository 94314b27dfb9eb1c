"""Discover rules of ops without a rule by experiments (`experiment`).

Experiments are not a proof: a split that is wrong only for untested values would be accepted.
Therefore ops are not tested if their schema shows that they modify operands, draw random numbers,
or have results whose shapes depend on values.

An op may write out of bounds if its operands do not match (some ops of torch do). Therefore the
experiments run in a child process, which may crash. If it does, a second child process only tests
the splits whose operands are likely to match.
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
from autopar.ops.formats import aten_op_of
from autopar.rules.call import NO_TENSOR, Call, KeyedCall, TensorInfo, op_name
from autopar.rules.expansion import expand
from autopar.rules.notation import AxisOption, exact_cast, replicated_option
from autopar.rules.small_calls import Trial, trials_of
from autopar.rules.trial import check_strategy, close, join, run, split, tolerance_of

# --------------------------------------------------------------------------------------------------
# A cache of discovered rules in the file ``discovered.json`` of the user's cache directory
# (`cache_home`).
#
# The file contains proposals. They are checked each time they are read, so a file that is stale,
# from another machine or edited by hand may omit options, but cannot lead to a wrong rule. The file
# is JSON, not pickle, and is valid for one version of torch. ``AUTOPAR_CACHE=0`` in the environment
# disables the cache. A file that is damaged, or that another user can write to, is not read: rules
# are discovered again, and a warning gives the reason. If the file cannot be written, discovered
# rules are only kept in memory.

_FORMAT, _VERSION = "autopar-discovered", 2


def path() -> Path | None:
    """Create the folder of the cache and return the path of its file. If other users can write to
    the folder, a folder of this process is used.

    Returns:
        The path, whose file may not exist; None if the cache is disabled, or its folder cannot be
        created.
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
    """Return the cached options of an equal call, without replicate-everything; empty if there are
    none."""
    try:
        options = tuple(map(decode, _rules(path()).get(_key(call), ())))
    except (LayoutError, TypeError, ValueError, AttributeError) as error:
        warn_once(
            f"an entry of the discovered rules is damaged ({error}); discovering {_key(call)} again"
        )
        return ()
    fit = all(
        len(o.inputs) == len(call.inputs) and len(o.outputs) == len(call.outputs) for o in options
    )
    return options if fit else ()


def save(call: Call, options: Sequence[AxisOption]) -> None:
    """Add the options of a call to the cache."""
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
    with contextlib.suppress(OSError):  # without the file, rules are discovered again
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8"
        ) as part:
            json.dump(data, part, indent=1, sort_keys=True)
        os.replace(part.name, file)


def encode(option: AxisOption) -> list[list[str]]:
    """Convert an option to JSON."""
    return [[str(Layout((p,))) for p in side] for side in (option.inputs, option.outputs)]


def decode(data: Sequence[Sequence[str]]) -> AxisOption:
    """Convert JSON to an option, as the inverse of `encode`.

    Raises:
        LayoutError: a placement cannot be parsed.
    """
    inputs, outputs = (
        [p for token in side for p in Layout.parse(token).placements] for side in data
    )
    return AxisOption(tuple(inputs), tuple(outputs))


def digest(rules: dict[str, Any]) -> str:
    """Return the checksum of the entries of a file."""
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def _rules(file: Path | None) -> dict[str, Any]:
    """Return the entries of a file; empty if it is missing, damaged, from another version, or
    writable by another user."""
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
    """Return the entries of parsed data; empty if they are from another version of autopar or
    torch.

    Raises:
        ValueError: the data do not have the format that `save` writes.
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
    """Return a key of op, schema, settings, shapes and dtypes; equal for equal calls in all
    processes."""
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
# Experiments on one call: which splits and partial sums of its operands reproduce the full result.
#
# Every way to split the operands on one axis, and every set of partial sums, is tested once on
# small tensors (`small_calls`). It is a proposal if the results of the ranks can be joined to the
# full result, as shards, sums, maxima, minima or copies. The proposal is accepted if it passes the
# check of all rules: with other values, for even and uneven parts, and on two axes in combination
# with every accepted option.
#
# An unknown op may crash for operands that do not match, so this runs in a child process
# (`_in_child`).

_NUM_PARTS = (2, 3)
_MOST_COMBINATIONS = 4096
_MOST_OPTIONS = 24


def experiment(
    call: Call, known: Sequence[AxisOption] = (), *, careful: bool = False
) -> tuple[tuple[AxisOption, ...], str]:
    """Find the options of a call.

    Args:
        call: the call.
        known: options of an earlier experiment; they are returned if all of them pass the check.
        careful: whether to test only the likely splits (`_likely_splits`).

    Returns:
        The options without replicate-everything, and the reason if none of them shards an operand,
        else ``""``.
    """
    with as_written(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            0
        )  # only the generator of the CPU, on which this runs; those of GPUs are not changed
        trials = trials_of(call)
        if not trials:
            return (), (
                "on small CPU tensors, its results are not finite, or differ between two runs"
            )
        varied = _results_that_vary(trials)
        if not any(varied):
            return (), "its result does not depend on its operands"
        options = _check_proposals(call, known, trials, varied)
        if not known or len(options) < len(known):
            options = _check_proposals(call, _proposals(call, trials[0], careful), trials, varied)
    is_split = any(isinstance(p, Shard) for option in options for p in option.inputs)
    return options, "" if is_split else "no sharding of its operands reproduces the full result"


def _results_that_vary(trials: Iterable[Trial]) -> list[bool]:
    """Return, per result, whether its elements differ; for a constant result, sums, maxima and
    copies cannot be distinguished."""
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
    """Yield the options that reproduce the result with two parts in one trial."""
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
        except Exception:  # an unknown op may raise any error for parts that it does not accept
            continue
        partial_inputs = [PARTIAL] if PARTIAL in inputs else None
        if all(len(r) == len(expected) for r in ranks):
            joins = [
                _joins(list(r), whole, partial_inputs, tolerance_of(small))
                for whole, *r in zip(expected, *ranks, strict=True)
            ]
            yield from (AxisOption(inputs, outputs) for outputs in itertools.product(*joins))


def _splits(small: Call) -> list[tuple[Placement, ...]]:
    """Return all combinations of a sharded dim, or none, per operand; if there are too many, only
    those whose sharded dims have equal size."""
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
    """Return the combinations that shard one dim, counted from the front or from the back, in all
    operands in which it has a given size."""
    splits: dict[tuple[Placement, ...], None] = {}
    shapes = [info.shape for info in small.inputs]
    for d, size in {
        (d, s)
        for shape in shapes
        for front, s in enumerate(shape)
        for d in (front, front - len(shape))
        if s > 1
    }:
        has = [-len(shape) <= d < len(shape) and shape[d] == size for shape in shapes]
        splits[
            tuple(
                Shard(d % len(shape)) if ok else REPLICATE
                for ok, shape in zip(has, shapes, strict=True)
            )
        ] = None
    return sorted(splits, key=str)


def _product(dims: Sequence[Sequence[Shard]]) -> Iterator[tuple[Placement, ...]]:
    return (
        c
        for c in itertools.product(*((REPLICATE, *choices) for choices in dims))
        if any(isinstance(p, Shard) for p in c)
    )


def _partial_sums(call: Call) -> list[tuple[Placement, ...]]:
    """Return the combinations of operands that may be partial sums: a cast of these operands to the
    dtypes of the results is exact."""
    results = [info for info in call.outputs if info != NO_TENSOR]
    able = [
        i
        for i, info in enumerate(call.inputs)
        if _is_summable(info) and all(exact_cast(info.dtype, out.dtype) for out in results)
    ]
    sizes = range(1, len(able) + 1) if len(able) <= 4 else (1, len(able))
    sets = [s for n in sizes for s in itertools.combinations(able, n)]
    return [tuple(PARTIAL if i in s else REPLICATE for i in range(len(call.inputs))) for s in sets]


def _is_summable(info: TensorInfo) -> bool:
    return info.dtype.is_floating_point or info.dtype.is_complex


def _joins(
    parts: list[torch.Tensor],
    whole: torch.Tensor | None,
    given: Sequence[Placement] | None,
    tolerance: float,
) -> list[Placement]:
    """Return the placements with which the results of two ranks join to the full result; with
    `given`, only these are tested."""
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
    return [
        p for p in given or (REPLICATE, *shards, *sums) if _joins_to(parts, whole, p, tolerance)
    ]


def _joins_to(
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


def _check_proposals(
    call: Call, proposals: Iterable[AxisOption], trials: Sequence[Trial], varied: Sequence[bool]
) -> tuple[AxisOption, ...]:
    """Return the proposals that pass the check, the first one per split of operands.

    Args:
        call: the call.
        proposals: the proposals.
        trials: small calls with operands.
        varied: per result, whether its elements differ; a constant result must be sharded.
    """
    confirmed: dict[tuple[Placement, ...], AxisOption] = {
        replicated_option(call).inputs: replicated_option(call)
    }
    for option in proposals:
        is_new = option.inputs not in confirmed and len(confirmed) < _MOST_OPTIONS
        is_determined = all(
            varies or isinstance(p, Shard) for varies, p in zip(varied, option.outputs, strict=True)
        )
        if (
            is_new
            and is_determined
            and _holds(option, trials)
            and _agrees(option, confirmed, trials[0])
        ):
            confirmed[option.inputs] = option
    return tuple(confirmed.values())[1:]


def _holds(option: AxisOption, trials: Sequence[Trial]) -> bool:
    """Return whether an option passes the check on one axis in every trial whose sizes it fits, and
    there is such a trial."""
    strategies = [
        (trial, s, n)
        for trial in trials
        for n in _NUM_PARTS
        for s in expand(trial[0], (replicated_option(trial[0]), option), (n,))[1:]
    ]
    return bool(strategies) and all(
        _passes(trial, strategy, (n,)) for trial, strategy, n in strategies
    )


def _agrees(
    option: AxisOption, kept: dict[tuple[Placement, ...], AxisOption], trial: Trial
) -> bool:
    """Return whether an option also passes the check in combination with the accepted options on
    two axes."""
    before = set(expand(trial[0], tuple(kept.values()), (2, 2)))
    added = [s for s in expand(trial[0], (*kept.values(), option), (2, 2)) if s not in before]
    return all(_passes(trial, strategy, (2, 2)) for strategy in added)


def _passes(trial: Trial, strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    try:
        check_strategy(*trial, strategy, mesh_shape)
    except RuleError:
        return False
    return True


_LONGEST_S = 60.0  # seconds without output after which a child is stopped
_TOO_LONG = '{"options": [], "reason": "the experiments timed out"}'
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
    """The result of experiments.

    Attributes:
        options: the options, replicate-everything first.
        reason: the reason if no other option was found, else ``""``.
    """

    options: tuple[AxisOption, ...]
    reason: str = ""


def unfit(target: Callable[..., Any]) -> str:
    """Return the reason why an op cannot have a rule; empty if it can."""
    if not isinstance(target, torch._ops.OpOverload):
        return "it is not a torch operator with a schema"
    if target._schema.is_mutable:
        return "it modifies its operands"
    if target.namespace in _COMMUNICATING:
        return "it communicates"
    return next((reason for tag, reason in _TAGS.items() if tag in target.tags), "")


def discover(call: Call) -> Discovery:
    """Find the options of a call by experiments on the CPU; equal calls give equal results."""
    return _discover(KeyedCall(replace(call, target=aten_op_of(call.target))))


@lru_cache(maxsize=4096)
def _discover(keyed: KeyedCall) -> Discovery:
    call = keyed.call
    reason = unfit(call.target) or (
        "" if call.inputs and call.outputs else "it has no tensors to shard"
    )
    options: tuple[AxisOption, ...] = ()
    if not reason:
        known = load(call)
        text = _in_child(lambda: _experiment_as_text(call, known))
        options, reason = _parse_experiment(
            text or _in_child(lambda: _experiment_as_text(call, known, careful=True))
        )
        if options and options != known:
            save(call, options)
    return Discovery((replicated_option(call), *options), reason)


def _experiment_as_text(call: Call, known: tuple[AxisOption, ...], *, careful: bool = False) -> str:
    options, reason = experiment(call, known, careful=careful)
    return json.dumps({"options": [encode(option) for option in options], "reason": reason})


def _parse_experiment(text: str) -> tuple[tuple[AxisOption, ...], str]:
    try:
        data = json.loads(text)
    except ValueError:
        return (), "the experiments failed"
    return tuple(map(decode, data["options"])), data["reason"]


def _in_child(work: Callable[[], str]) -> str:
    """Return the text that `work` returns in a forked child process; empty if the child crashes, or
    the system has no fork."""
    if not hasattr(os, "fork"):
        return ""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # about forking a process with threads; the child uses no threads
        child = os.fork()
    if child == 0:
        _run_child(work, read, write)
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


def _run_child(work: Callable[[], str], read: int, write: int) -> None:
    """Run `work` in the child, write its text to the pipe, and exit without running the cleanup of
    the parent."""
    try:
        import resource  # not available on all systems

        os.close(read)
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide messages of a crashing op
        torch.set_num_threads(1)  # threads do not exist after a fork
        text = work().encode()
        while text:
            text = text[os.write(write, text) :]
    finally:
        os._exit(0)
