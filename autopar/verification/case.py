"""One comparison's material, and its three computations, all in one dtype.

plain       the user's model, copied and converted, eager forward and backward;
traced      the captured normal-form graph, interpreted on one device;
program     the emitted graphs, all ranks in lockstep.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from autopar import ops
from autopar.capture import Trace
from autopar.capture.autocast import gpu_autocast
from autopar.capture.dynamo.flex_attention import flex_attention_eager
from autopar.capture.execute import device_of, execute, promote, promoted_dtype
from autopar.capture.normalize.tangents import tangent_of
from autopar.capture.precision import narrow_dtype
from autopar.capture.trees import flatten_call, flatten_with_paths, unflatten
from autopar.errors import VerificationError
from autopar.ops import random
from autopar.program.interpreter import Lockstep, Observer, run_lockstep
from autopar.program.interpreter_stages import run_staged
from autopar.program.program import Program, StagedProgram
from autopar.verification.comparison import Results
from autopar.verification.drawing import PositionalDraws, draws_by_sample

# --------------------------------------------------------------------------------------------------
# The plain model with the parts that it computes in a smaller dtype computed in the one asked
# for, as its traced graph computes them.
#
# Models cast to float32 where they were written for 16 bits: norms, softmaxes, rotary embeddings.
# In a float64 run these parts still round to 24 bits, and what follows may magnify that. Run so,
# nothing rounds, and a program is held against the model with float64's own tolerance.


class Widened(TorchDispatchMode):
    """Where an op is asked for a floating or complex dtype smaller than `dtype`, it is asked for
    `dtype` (or its complex twin)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._complex = dtype, dtype.to_complex()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (
            tuple(map(self._wide, args)),
            {name: self._wide(x) for name, x in (kwargs or {}).items()},
        )
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and not any(
            isinstance(x, Tensor) for x in args
        ):  # a factory without a dtype takes the default one
            wanted = self._wide(made.dtype)
            return made if wanted == made.dtype else made.to(wanted)
        return made

    def _wide(self, x: Any) -> Any:
        if not isinstance(x, torch.dtype) or not (x.is_floating_point or x.is_complex):
            return x
        wanted = self._complex if x.is_complex else self._dtype
        return wanted if x.itemsize < wanted.itemsize else x


# --------------------------------------------------------------------------------------------------
# The eps that a norm takes from its dtype where none is given, while the model is promoted.


class OwnEps(TorchFunctionMode):
    """Calls of rms_norm without eps take that of `dtype`, the model's own, which is in its
    traced graph."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._eps = _eps_of(dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func in (torch.rms_norm, torch.nn.functional.rms_norm)
            and (args[3] if len(args) > 3 else kwargs.get("eps")) is None
        ):
            args, kwargs["eps"] = args[:3], self._eps
        return func(*args, **kwargs)


@functools.cache
def _eps_of(dtype: torch.dtype) -> float:
    """As torch has it, of the dtype itself or, as of torch 2.13, of that in which it computes a
    norm: found by norming one small number, which becomes x / √(x² + eps)."""
    known = [torch.finfo(each).eps for each in dict.fromkeys((dtype, torch.float32))]
    x = torch.tensor([1e-3], dtype=dtype)
    normed = torch.nn.functional.rms_norm(x, (1,)).double()
    wanted = [x.double() / (x.double() ** 2 + eps) ** 0.5 for eps in known]
    return min(zip(known, wanted, strict=True), key=lambda pair: float((pair[1] - normed).abs()))[0]


# Making numbers in a small dtype, or moving them, loses nothing that a run in a larger one could
# keep.
_NO_COMPUTING = (
    "zeros",
    "ones",
    "full",
    "empty",
    "arange",
    "scalar_tensor",
    "lift_fresh",
    "view",
    "reshape",
    "expand",
    "detach",
    "alias",
)


class PlainModelError(VerificationError):
    """The plain model cannot be run, or gives no number."""


@dataclass(frozen=True, slots=True)
class Case:
    """A traced model, its program, and a batch.

    Attributes:
        tensors: parameters and buffers by every name. inputs: the trace's inputs, in order.
        dtype: what floating tensors are converted to, or None. computed: the dtype that is computed
            in. own: the model's own.
        widened: whether the plain model computes in `computed` what it would compute in a smaller
            dtype (`autopar.verification.case`).
    """

    trace: Trace
    program: Program | StagedProgram
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None
    computed: torch.dtype
    own: torch.dtype
    widened: bool = False

    @staticmethod
    def of(
        trace: Trace,
        program: Program | StagedProgram,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype | None,
    ) -> Case:
        """Raises `VerificationError` where a tensor has no values."""
        leaves = dict(flatten_call(args, dict(kwargs))[0])
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        empty = [
            name for name, x in (*named, *leaves.items()) if isinstance(x, Tensor) and x.is_meta
        ]
        if empty:
            raise VerificationError(
                f"{len(empty)} tensors are on meta and have no values, {empty[0]!r} first",
                remedy=(
                    "verify a model and a batch that have values: build a smaller one of the same"
                    " structure, off meta"
                ),
            )
        floating = [
            p.dtype.to_real() for p in model.parameters() if p.is_floating_point() or p.is_complex()
        ]
        own = narrow_dtype(
            min(floating, key=lambda d: d.itemsize, default=torch.get_default_dtype()),
            trace.precision,
        )
        tensors = {name: x.detach() for name, x in named}
        tensors[random.STATE] = random.initial_state(0).to(device_of(tensors.values()))
        return Case(
            trace,
            program,
            model,
            args,
            kwargs,
            tensors,
            tuple(leaves[i.path] for i in trace.inputs),
            dtype,
            dtype or own,
            own,
        )

    @property
    def num_draws(self) -> int:
        """How often a step draws random numbers, those included that nothing reads; but not
        behind the last one that is read."""
        return 1 + max(
            (node.kwargs["draw"] for node in self.trace.graph.nodes if "draw" in node.kwargs),
            default=-1,
        )

    @property
    def loss(self) -> str | None:
        """The loss' output path, None where there is none."""
        return None if self.trace.loss is None else self.trace.loss.path

    @property
    def num_draws_apart(self) -> int:
        """Into how many microbatches the batch is cut, each with random numbers of its own; 1
        where nothing is drawn."""
        return (
            self.program.microbatches.num
            if isinstance(self.program, StagedProgram) and self.num_draws
            else 1
        )

    def run_program(self, observe: Observer | None = None) -> Lockstep:
        if isinstance(self.program, StagedProgram):
            by_path = {i.path: x for i, x in zip(self.trace.inputs, self.inputs, strict=True)}
            return run_staged(
                self.program, self.tensors, self.tensors, by_path, dtype=self.dtype, observe=observe
            )
        return run_lockstep(
            self.program, self.tensors, self.tensors, self.inputs, dtype=self.dtype, observe=observe
        )

    def run_traced(self, observe: Callable[[fx.Node, Any], None] | None = None) -> Results:
        outputs, gradients, buffers = execute(
            self.trace, self.tensors, self.tensors, self.inputs, dtype=self.dtype, observe=observe
        )
        return Results(
            self._returned_outputs(
                {o.path: x for o, x in zip(self.trace.outputs, outputs, strict=True)}
            ),
            buffers,
            gradients,
        )

    def run_plain(self) -> tuple[Results, dict[str, torch.dtype]]:
        """The plain model's step, and the ops that it computes in a smaller dtype than `computed`,
        each with that dtype.

        Where microbatches draw random numbers, each sample gets those of its own microbatch; where
        numbers are for all samples of one, the plain model is run on each.

        Raises:
            VerificationError: where it is run on each, and its loss is divided by what is counted
                in all.
        """
        state = self.tensors[random.STATE]
        if isinstance(self.program, StagedProgram) and self.num_draws_apart > 1:
            by_sample = draws_by_sample(
                self.trace, self.program.trace, self.program.microbatches.num, state
            )
        else:
            by_sample = PositionalDraws(state)
        if by_sample is not None:
            step, lower = self._run_plain(self.args, self.kwargs, by_sample, {})
            return replace(step, outputs=self._returned_outputs(step.outputs)), lower
        assert isinstance(self.program, StagedProgram), (
            "only programs with stages have microbatches"
        )
        if self.program.microbatches.counts:
            what = (
                "microbatches draw random numbers of their own that no sample has, and the loss is"
                " divided by what all of them count"
            )
            raise VerificationError(what, remedy="verify in eval mode, or a plan of one microbatch")
        leaves, spec = flatten_call(self.args, dict(self.kwargs))
        how, found = self.program.microbatches, dict[str, torch.dtype]()
        parts = how.split({path: x for path, x in leaves if isinstance(x, Tensor)})
        answers = self._tangents_of_parts(self.program)
        steps: list[Results] = []
        for number, part in enumerate(parts):
            args, kwargs = unflatten([part.get(path, leaf) for path, leaf in leaves], spec)
            step, lower = self._run_plain(
                args, kwargs, PositionalDraws(state + number), answers[number]
            )
            found |= lower
            steps.append(step)
        made = self._returned_outputs(steps[0].outputs)
        outputs = {path: how.join(path, [step.outputs[path] for step in steps]) for path in made}
        gradients = {
            name: torch.stack([step.gradients[name] * how.weight for step in steps]).sum(0)
            for name in steps[0].gradients
        }
        return Results(outputs, steps[-1].buffers, gradients), found

    def _returned_outputs(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those that calls of the program may return: of several microbatches the ones that can
        be put together."""
        made = (
            self.program.microbatches.outputs
            if isinstance(self.program, StagedProgram)
            else outputs
        )
        return {path: x for path, x in outputs.items() if path in made}

    def _tangents_of_parts(self, program: StagedProgram) -> list[dict[str, Tensor]]:
        """What backward of each microbatch begins with, by autograd through what puts outputs
        together, not as the program has it."""
        found: list[dict[str, Tensor]] = [{} for _ in range(program.microbatches.num)]
        device = device_of(self.tensors.values())
        for o in () if self.loss is not None else program.trace.differentiable:
            dtype = promoted_dtype(o.dtype, self.dtype)
            parts = [
                torch.zeros(o.shape, dtype=dtype, device=device, requires_grad=True) for _ in found
            ]
            whole = program.microbatches.join(o.path, list(parts))
            whole.backward(tangent_of(o.path, whole.shape, dtype, is_loss=False).to(device))
            for mine, part in zip(found, parts, strict=True):
                mine[o.path] = torch.zeros_like(part) if part.grad is None else part.grad
        return found

    def _run_plain(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        draws: PositionalDraws,
        answers: Mapping[str, Tensor],
    ) -> tuple[Results, dict[str, torch.dtype]]:
        plain = _copy_model(self.model)._apply(
            self._promote
        )  # Module.to would make complex buffers real
        plain.zero_grad(set_to_none=True)
        for parameter in plain.parameters():
            parameter.data = self._narrow(parameter.data)
        watch = _LowerDtypes(self.computed)
        args, kwargs = tree_map(self._input, (args, dict(kwargs)))
        own_eps = OwnEps(self.own)  # made before anything is watched: it norms a number to know
        trained = bool(self.trace.differentiable)
        with torch.set_grad_enabled(trained), self._refused_by_kernels():
            drawn = draws if self.num_draws else nullcontext()
            with (
                self._autocast() as outside,
                Widened(self.computed) if self.widened else nullcontext(),
            ):
                with (
                    drawn,
                    watch,
                    own_eps,
                    self._as_written(),
                ):  # the draws themselves are not watched
                    returned = plain(*args, **kwargs)
                outputs = dict(flatten_with_paths(returned)[0])
                with outside():  # as users are to run it
                    self._backward(outputs, answers)
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        buffers = dict(plain.named_buffers(remove_duplicate=False))
        results = Results(
            {o.path: outputs[o.path].detach() for o in self.trace.outputs},
            {name: buffers[name].detach() for name in self.trace.mutated if name != random.STATE},
            {
                p.name: _gradient(parameters[p.name])
                for p in self.trace.parameters
                if p.requires_grad and trained
            }
            | self._of_inputs(args, kwargs),
        )
        if draws.num_draws != self.num_draws:
            raise VerificationError(
                f"the plain model draws {draws.num_draws} times, the traced graph {self.num_draws}"
                " times: they cannot be compared",
                remedy="remove random numbers that nothing reads, or report the model",
            )
        return results, watch.found

    def _as_written(self) -> AbstractContextManager[None]:
        """Where the model calls flex attention, what it compiles runs as it is written, with
        gradients on a CPU as well."""
        calls = any(node.target is ops.flex_attention for node in self.trace.graph.nodes)
        return flex_attention_eager() if calls else nullcontext()

    @contextmanager
    def _refused_by_kernels(self) -> Iterator[None]:
        """In another dtype than the model's own some op may have no kernel, or a constant no room;
        in its own, errors are the model's.

        A precision is not the model's own: with parameters in it, and buffers that are not, ops may
        have no kernel either.
        """
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            as_asked = self.dtype is None or self.dtype == self.own
            if as_asked and self.trace.precision is None:
                raise
            said = next(iter(str(error).splitlines()), type(error).__name__)
            where = f" with parameters in {self.own} and buffers as they are" if as_asked else ""
            # In another dtype than its own nobody is told: it is verified in its own then.
            remedy = "verify in a wider dtype: pass dtype=torch.float64"
            raise PlainModelError(f"the plain model fails{where}: {said}", remedy=remedy) from error

    def _backward(self, outputs: Mapping[str, Any], answers: Mapping[str, Tensor]) -> None:
        """From the loss, or from what stands for the gradients of a user's loss: `answers`,
        where only a part of the batch ran."""
        ends = [(outputs[o.path], o) for o in self.trace.differentiable]
        whole = [
            None if o.path in answers else tangent_of(o.path, x.shape, x.dtype, is_loss=o.is_loss)
            for x, o in ends
        ]
        tangents = [
            (answers[o.path] if made is None else made).to(x)
            for made, (x, o) in zip(whole, ends, strict=True)
        ]
        if ends:
            torch.autograd.backward([x for x, _ in ends], tangents)

    def _autocast(self) -> AbstractContextManager[Callable[[], AbstractContextManager[Any]]]:
        """As in capture; on a GPU the model's own. Gives what makes a context outside of
        autocast."""
        on_gpu = any(x.is_cuda for x in (*self.tensors.values(), *self.inputs))
        return (
            nullcontext(lambda: torch.autocast("cuda", enabled=False))
            if on_gpu
            else gpu_autocast(on_gpu=False)
        )

    def _input(self, x: Any) -> Any:
        """A leaf of the call, which gets a gradient of its own where the user's has one."""
        given = self._narrow(self._promote(x))
        return (
            given.detach().requires_grad_()
            if isinstance(x, Tensor) and x.requires_grad and self.trace.differentiable
            else given
        )

    def _of_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Their gradients, of a call that `_input` made, as they are called among others."""
        leaves = dict(flatten_call(args, dict(kwargs))[0])
        return {i.gradient_name: _gradient(leaves[i.path]) for i in self.trace.given_back}

    def _narrow(self, x: Any) -> Any:
        """A parameter or an input in the precision that was asked for, unless all is computed in
        another dtype."""
        return (
            x.to(narrow_dtype(x.dtype, self.trace.precision))
            if self.dtype is None and isinstance(x, Tensor)
            else x
        )

    def _promote(self, x: Any) -> Any:
        return promote(x, self.dtype)


class _LowerDtypes(TorchDispatchMode):
    """Names the ops that compute in a floating dtype smaller than `dtype`, with it; of complex
    numbers the dtype of their parts counts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = dtype.itemsize
        self.found: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        for leaf in tree_leaves(result):
            rounds = isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
            if (
                rounds
                and leaf.dtype.to_real().itemsize < self.size
                and not any(word in name for word in _NO_COMPUTING)
            ):
                self.found[f"{name} in {str(leaf.dtype).removeprefix('torch.')}"] = (
                    leaf.dtype.to_real()
                )
        return result


def _copy_model(model: nn.Module) -> nn.Module:
    """A copy; tensors that a module holds beside its parameters and buffers may have been
    computed, as `weight_norm` does."""
    held = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in held})


def _gradient(parameter: Tensor) -> Tensor:
    """Zeros where the loss does not depend on the parameter."""
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
