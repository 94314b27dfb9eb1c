"""Experiments on one call: which splits and partial sums of its operands give the whole result.

Every way to split the operands on one axis, and every set of partial sums, is tried once on small tensors (`scaling`); where
the results of the ranks join to the whole, by shards, as sums, maxima, minima or as they are, that is an option. It is taken
only after the same law as all rules: on other numbers, on even and uneven parts, and beside every option that was taken before
it, on two axes.

An op that is not known may do anything with operands that do not belong together, so this runs in a process of its own
(`discovery`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.ambient import as_written
from autopar.errors import RuleError
from autopar.layout import PARTIAL, REPLICATE, Layout, Strategy
from autopar.rules.call import NO_TENSOR, Call, TensorInfo
from autopar.rules.expansion import expand
from autopar.rules.notation import AxisOption, exact_cast, replicated
from autopar.rules.scaling import Trial, trials_of
from autopar.rules.trial import check_strategy, close, join, run, split, tolerance_of

_NUM_PARTS = (2, 3)
_MOST_COMBINATIONS = 4096
_MOST_OPTIONS = 24


def experiment(call: Call, known: Sequence[AxisOption] = (), *, careful: bool = False) -> tuple[tuple[AxisOption, ...], str]:
    """The options of a call but replicate-everything; where none of them splits it, why.

    Args:
        known: what an earlier experiment gave. Where all of it obeys the law, it is the answer.
        careful: try only the likely splits, see `_likely_splits`.
    """
    with as_written(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # of the CPU alone, where it runs: those of GPUs are the script's
        trials = trials_of(call)
        if not trials:
            return (), "it gave no numbers on small tensors of the CPU, or others the second time"
        tells = _tells(trials)
        if not any(tells):
            return (), "its result is the same whatever goes in"
        options = _proven(call, known, trials, tells)
        if not known or len(options) < len(known):
            options = _proven(call, _proposals(call, trials[0], careful), trials, tells)
    is_split = any(isinstance(p, Shard) for option in options for p in option.inputs)
    return options, "" if is_split else "no split of it reproduces the whole"


def _tells(trials: Iterable[Trial]) -> list[bool]:
    """Per result whether it is not one and the same number everywhere, which a sum, a maximum and a copy could all be."""
    results = zip(*(run(call.target, call.args, call.kwargs, tensors, (), ()) for call, tensors in trials), strict=True)
    return [None in of_trials or _varies(torch.cat([r.flatten() for r in of_trials])) for of_trials in results]


def _varies(x: torch.Tensor) -> bool:
    return bool((x != x[0]).any()) if x.numel() else False


def _proposals(call: Call, trial: Trial, careful: bool) -> Iterator[AxisOption]:
    """Options that hold on two parts of one trial."""
    small, tensors = trial
    expected, random = run(small.target, small.args, small.kwargs, tensors, (), ()), torch.Generator("cpu").manual_seed(0)
    for inputs in (*(_likely_splits(small) if careful else _splits(small)), *_partial_sums(call)):
        layouts = [Layout((p,)) for p in inputs]
        if not all(layout.fits(info.shape, (2,)) for layout, info in zip(layouts, small.inputs, strict=True)):
            continue
        parts = [split(x, layout, (2,), random) for x, layout in zip(tensors, layouts, strict=True)]
        try:
            ranks = [run(small.target, small.args, small.kwargs, [p[(rank,)] for p in parts], (), ()) for rank in range(2)]
        except Exception:  # an op that is not known may raise anything: it does not take these parts
            continue
        given = [PARTIAL] if PARTIAL in inputs else None
        if all(len(r) == len(expected) for r in ranks):
            joins = [_joins(list(r), whole, given, tolerance_of(small)) for whole, *r in zip(expected, *ranks, strict=True)]
            yield from (AxisOption(inputs, outputs) for outputs in itertools.product(*joins))


def _splits(small: Call) -> list[tuple[Placement, ...]]:
    """Every choice of a dim, or none, of every operand; where these are too many, of dims of one size together."""
    dims = [[Shard(d) for d, size in enumerate(info.shape) if size > 1] for info in small.inputs]
    if math.prod(len(choices) + 1 for choices in dims) > _MOST_COMBINATIONS:
        sizes = sorted({size for info in small.inputs for size in info.shape if size > 1})
        per_size = [_product([[p for p in ps if i.shape[p.dim] == s] for ps, i in zip(dims, small.inputs, strict=True)]) for s in sizes]
        return list(itertools.islice(itertools.chain.from_iterable(per_size), _MOST_COMBINATIONS))
    return list(_product(dims))


def _likely_splits(small: Call) -> list[tuple[Placement, ...]]:
    """The same dim of all operands in which it has the same size, counted from the front or from the back."""
    found: dict[tuple[Placement, ...], None] = {}
    shapes = [info.shape for info in small.inputs]
    for d, size in {(d, s) for shape in shapes for front, s in enumerate(shape) for d in (front, front - len(shape)) if s > 1}:
        has = [-len(shape) <= d < len(shape) and shape[d] == size for shape in shapes]
        found[tuple(Shard(d % len(shape)) if ok else REPLICATE for ok, shape in zip(has, shapes, strict=True))] = None
    return sorted(found, key=str)


def _product(dims: Sequence[Sequence[Shard]]) -> Iterator[tuple[Placement, ...]]:
    return (c for c in itertools.product(*((REPLICATE, *choices) for choices in dims)) if any(isinstance(p, Shard) for p in c))


def _partial_sums(call: Call) -> list[tuple[Placement, ...]]:
    """Sets of operands that may be partial sums: those whose cast to the results rounds nothing."""
    results = [info for info in call.outputs if info != NO_TENSOR]
    able = [i for i, info in enumerate(call.inputs) if _adds(info) and all(exact_cast(info.dtype, out.dtype) for out in results)]
    sizes = range(1, len(able) + 1) if len(able) <= 4 else (1, len(able))
    sets = [s for n in sizes for s in itertools.combinations(able, n)]
    return [tuple(PARTIAL if i in s else REPLICATE for i in range(len(call.inputs))) for s in sets]


def _adds(info: TensorInfo) -> bool:
    return info.dtype.is_floating_point or info.dtype.is_complex


def _joins(parts: list[torch.Tensor], whole: torch.Tensor | None, given: Sequence[Placement] | None, tolerance: float) -> list[Placement]:
    """The placements that make the whole of two ranks' results; `given` are the only ones that may."""
    if whole is None:
        return [REPLICATE]
    shards = [Shard(d) for d, size in enumerate(whole.shape) if size > 1]
    sums = [] if whole.dtype == torch.bool else [PARTIAL] if whole.is_complex() else [PARTIAL, Partial("max"), Partial("min")]
    return [p for p in given or (REPLICATE, *shards, *sums) if _makes(parts, whole, p, tolerance)]


def _makes(parts: list[torch.Tensor], whole: torch.Tensor, placement: Placement, tolerance: float) -> bool:
    layout = Layout((placement,))
    if not isinstance(placement, Shard) and any(p.shape != whole.shape for p in parts):
        return False
    if not layout.fits(whole.shape, (2,)):
        return False
    joined = join({(rank,): part for rank, part in enumerate(parts)}, whole, layout, (2,), tolerance)
    return not isinstance(joined, str) and close(joined, whole, tolerance)


def _proven(call: Call, proposals: Iterable[AxisOption], trials: Sequence[Trial], tells: Sequence[bool]) -> tuple[AxisOption, ...]:
    """Those proposals that obey the law; of several for one split of operands, the first. A result that tells nothing must be
    split, which its shape shows."""
    kept: dict[tuple[Placement, ...], AxisOption] = {replicated(call).inputs: replicated(call)}
    for option in proposals:
        is_new = option.inputs not in kept and len(kept) < _MOST_OPTIONS
        shows = all(told or isinstance(p, Shard) for told, p in zip(tells, option.outputs, strict=True))
        if is_new and shows and _holds(option, trials) and _agrees(option, kept, trials[0]):
            kept[option.inputs] = option
    return tuple(kept.values())[1:]


def _holds(option: AxisOption, trials: Sequence[Trial]) -> bool:
    """Whether the option obeys the law on one axis, in every trial in which it fits; and there is one."""
    strategies = [(trial, s, n) for trial in trials for n in _NUM_PARTS for s in expand(trial[0], (replicated(trial[0]), option), (n,))[1:]]
    return bool(strategies) and all(_obeys(trial, strategy, (n,)) for trial, strategy, n in strategies)


def _agrees(option: AxisOption, kept: dict[tuple[Placement, ...], AxisOption], trial: Trial) -> bool:
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
