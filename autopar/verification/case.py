"""One comparison of a program with the plain model: its inputs and its three computations, all in
the same dtype.

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
from autopar.program.interpreter import Observer
from autopar.program.lockstep import Lockstep, run_lockstep
from autopar.program.program import Program
from autopar.verification.comparison import Results
from autopar.verification.drawing import PositionalDraws, draws_by_sample

# --------------------------------------------------------------------------------------------------
# Run the plain model in the requested dtype throughout, also in parts that it computes in a smaller
# dtype, as its traced graph does.
#
# Models written for 16 bits cast to float32 in norms, softmaxes and rotary embeddings. In a float64
# run these parts still round to 24 bits, and later ops may magnify the error. In this mode all
# parts compute in the requested dtype, and the program is compared with the model under the
# tolerance of float64.


class WideningMode(TorchDispatchMode):
    """A mode in which ops that request a floating or complex dtype smaller than `dtype` get `dtype`
    (or its complex counterpart) instead.

    Factory functions without a dtype, and ops on integers such as ``count + 1.0``, return the
    default dtype. Their results are converted, as in a traced graph.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._complex = dtype, dtype.to_complex()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (
            tuple(map(self._wide, args)),
            {name: self._wide(x) for name, x in (kwargs or {}).items()},
        )
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not _computes(args, kwargs):
            wide_dtype = self._wide(result.dtype)
            return result if wide_dtype == result.dtype else result.to(wide_dtype)
        return result

    def _wide(self, x: Any) -> Any:
        if not isinstance(x, torch.dtype) or not (x.is_floating_point or x.is_complex):
            return x
        wide_dtype = self._complex if x.is_complex else self._dtype
        return wide_dtype if x.itemsize < wide_dtype.itemsize else x


def _computes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an op has an operand with a floating or complex dtype."""
    given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return any(x.is_floating_point() or x.is_complex() for x in given)


# --------------------------------------------------------------------------------------------------
# The default eps of a norm depends on its dtype. A promoted model must keep the eps of its own
# dtype.


class OwnEps(TorchFunctionMode):
    """A mode in which rms_norm without eps uses the eps of `dtype`, the model's own dtype, as the
    traced graph does."""

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
    """Return the default eps of a norm in a dtype.

    It is the eps of the dtype itself or, since torch 2.13, the eps of the dtype in which torch
    computes the norm. To find it, one small number is normed: x becomes x / √(x² + eps).
    """
    known = [torch.finfo(each).eps for each in dict.fromkeys((dtype, torch.float32))]
    x = torch.tensor([1e-3], dtype=dtype)
    normed = torch.nn.functional.rms_norm(x, (1,)).double()
    expected = [x.double() / (x.double() ** 2 + eps) ** 0.5 for eps in known]
    errors = {eps: float((x - normed).abs()) for eps, x in zip(known, expected, strict=True)}
    return min(errors, key=errors.__getitem__)


OF_INTEGERS = " of integers"
"""Part of the name of an op whose result has torch's default dtype, since its operands have no
floating dtype."""
# Ops that create or move numbers in a small dtype are as exact as in a larger one.
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


class UndeterminedError(VerificationError):
    """Raised if the result of the plain model itself changes when its values change by their
    rounding, so that no program can be compared with it."""


class PlainModelError(VerificationError):
    """Raised if the plain model cannot run, or if its loss is not finite."""


@dataclass(frozen=True, slots=True)
class Case:
    """A traced model, its program and a batch.

    Attributes:
        trace: the traced call of the model.
        program: the program emitted from a plan for `trace`.
        model: the plain model, with values.
        args, kwargs: arguments of the call, with values.
        tensors: parameters and buffers, by all of their names.
        inputs: inputs of the trace, in order.
        dtype: dtype to which floating tensors are converted; None for no conversion.
        compute_dtype: dtype of the computation.
        own_dtype: the model's own dtype.
        widened: whether the plain model computes in `compute_dtype` the parts that it would compute
            in a smaller dtype (see `WideningMode`).
    """

    trace: Trace
    program: Program
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype | None
    compute_dtype: torch.dtype
    own_dtype: torch.dtype
    widened: bool = False

    @staticmethod
    def of(
        trace: Trace,
        program: Program,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        dtype: torch.dtype | None,
    ) -> Case:
        """Collect the inputs of a comparison.

        Args:
            trace: the traced call of the model.
            program: the program emitted from a plan for `trace`.
            model: the plain model, with values.
            args, kwargs: arguments of the call, with values.
            dtype: dtype to which floating tensors are converted; None computes in the model's own
                dtype.

        Raises:
            VerificationError: if a tensor is on the meta device and has no values.
        """
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
                f"{len(empty)} tensors are on the meta device and have no values, first"
                f" {empty[0]!r}",
                remedy=(
                    "verify a model and a batch with values: build a smaller one of the same"
                    " structure on another device"
                ),
            )
        floating = [
            p.dtype.to_real() for p in model.parameters() if p.is_floating_point() or p.is_complex()
        ]
        own_dtype = narrow_dtype(
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
            dtype or own_dtype,
            own_dtype,
        )

    @property
    def by_path(self) -> dict[str, Tensor]:
        """The inputs by their paths."""
        return {i.path: x for i, x in zip(self.trace.inputs, self.inputs, strict=True)}

    @property
    def num_draws(self) -> int:
        """The number of random draws of a step, up to the last draw that is read."""
        return 1 + max(
            (node.kwargs["draw"] for node in self.trace.graph.nodes if "draw" in node.kwargs),
            default=-1,
        )

    @property
    def loss(self) -> str | None:
        """The path of the loss among the outputs; None if there is none."""
        return None if self.trace.loss is None else self.trace.loss.path

    @property
    def num_separate_draws(self) -> int:
        """The number of microbatches that draw their own random numbers; 1 if nothing is drawn."""
        return self.program.microbatches.num if self.num_draws else 1

    def run_program(self, observe: Observer | None = None) -> Lockstep:
        """Run the program on all ranks in lockstep.

        `observe` is called with each emitted node and its values on all ranks.
        """
        return run_lockstep(
            self.program,
            self.tensors,
            self.tensors,
            self.by_path,
            dtype=self.dtype,
            observe=observe,
        )

    def run_traced(self, observe: Callable[[fx.Node, Any], None] | None = None) -> Results:
        """Run the traced graph on one device.

        `observe` is called with each node of the graph and its value.
        """
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
        """Run a step of the plain model.

        If microbatches draw random numbers, each sample gets the numbers of its own microbatch. If
        a draw is shared by all samples of a microbatch, the plain model runs on each microbatch
        separately.

        Returns:
            The results, and the ops that the model computes in a smaller dtype than `computed`,
            with these dtypes.

        Raises:
            VerificationError: if the model must run on each microbatch, but its loss is divided by
                a count over the whole batch.
        """
        state = self.tensors[random.STATE]
        by_sample: PositionalDraws | None = PositionalDraws(state)
        if self.num_separate_draws > 1:
            by_sample = draws_by_sample(
                self.trace, self.program.trace, self.num_separate_draws, state
            )
        if by_sample is not None:
            step, lower = self._run_plain(self.args, self.kwargs, by_sample, {})
            return replace(step, outputs=self._returned_outputs(step.outputs)), lower
        if self.program.microbatches.counts:
            message = (
                "every microbatch draws its own random numbers, which match no sample of the"
                " batch, but the loss is divided by a count over all microbatches"
            )
            raise VerificationError(
                message, remedy=("verify in eval mode, or use a plan with one microbatch")
            )
        leaves, spec = flatten_call(self.args, dict(self.kwargs))
        how, lower_dtypes = self.program.microbatches, dict[str, torch.dtype]()
        parts = how.split({path: x for path, x in leaves if isinstance(x, Tensor)})
        answers = self._tangents_of_parts()
        steps: list[Results] = []
        for number, part in enumerate(parts):
            args, kwargs = unflatten([part.get(path, leaf) for path, leaf in leaves], spec)
            step, lower = self._run_plain(
                args, kwargs, PositionalDraws(state + number), answers[number]
            )
            lower_dtypes |= lower
            steps.append(step)
        returned = self._returned_outputs(steps[0].outputs)
        outputs = {
            path: how.join(path, [step.outputs[path] for step in steps]) for path in returned
        }
        gradients = {
            name: torch.stack([step.gradients[name] * how.weight for step in steps]).sum(0)
            for name in steps[0].gradients
        }
        return Results(outputs, steps[-1].buffers, gradients), lower_dtypes

    def _returned_outputs(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Select the outputs that the program returns. With several microbatches, these are the
        outputs that can be joined."""
        returned = self.program.microbatches.outputs
        return {path: x for path, x in outputs.items() if path in returned}

    def _tangents_of_parts(self) -> list[dict[str, Tensor]]:
        """Return the gradients with which the backward of each microbatch begins.

        Autograd computes them through the function that joins outputs, independently of the
        program.
        """
        program = self.program
        tangents: list[dict[str, Tensor]] = [{} for _ in range(program.microbatches.num)]
        device = device_of(self.tensors.values())
        for o in () if self.loss is not None else program.trace.differentiable:
            dtype = promoted_dtype(o.dtype, self.dtype)
            parts = [
                torch.zeros(o.shape, dtype=dtype, device=device, requires_grad=True)
                for _ in tangents
            ]
            full_output = program.microbatches.join(o.path, list(parts))
            full_output.backward(
                tangent_of(o.path, full_output.shape, dtype, is_loss=False).to(device)
            )
            for mine, part in zip(tangents, parts, strict=True):
                mine[o.path] = torch.zeros_like(part) if part.grad is None else part.grad
        return tangents

    def _run_plain(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        draws: PositionalDraws,
        answers: Mapping[str, Tensor],
    ) -> tuple[Results, dict[str, torch.dtype]]:
        plain = _copy_model(self.model)._apply(
            self._promote
        )  # Module.to would convert complex buffers to real ones
        plain.zero_grad(set_to_none=True)
        for parameter in plain.parameters():
            parameter.data = self._narrow(parameter.data)
        watch = _LowerDtypes(self.compute_dtype)
        args, kwargs = tree_map(self._input, (args, dict(kwargs)))
        own_eps = OwnEps(self.own_dtype)  # before `watch` is entered, since it runs a norm
        trained = bool(self.trace.differentiable)
        with torch.set_grad_enabled(trained), self._refused_by_kernels():
            drawn = draws if self.num_draws else nullcontext()
            with (
                self._autocast() as outside,
                WideningMode(self.compute_dtype) if self.widened else nullcontext(),
            ):
                with (
                    drawn,
                    watch,
                    own_eps,
                    self._without_compilation(),
                ):  # `watch` does not see the ops within draws
                    returned = plain(*args, **kwargs)
                outputs = dict(flatten_with_paths(returned)[0])
                with outside():  # as users should run backward
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
                remedy="remove random numbers that are never read, or report the model",
            )
        return results, watch.found

    def _without_compilation(self) -> AbstractContextManager[None]:
        """Let code that the model compiles around flex attention run uncompiled. Then it has
        gradients on CPUs too."""
        calls = any(node.target is ops.flex_attention for node in self.trace.graph.nodes)
        return flex_attention_eager() if calls else nullcontext()

    @contextmanager
    def _refused_by_kernels(self) -> Iterator[None]:
        """Convert errors of the plain model to `PlainModelError` if it does not run in its own
        dtype.

        An op may have no kernel for the dtype, or a constant may overflow. With a planned
        precision, the model does not run in its own dtype either: ops may have no kernel for
        parameters in this precision and buffers in another. In the model's own dtype, errors are
        raised unchanged.
        """
        try:
            yield
        except (RuntimeError, ValueError, TypeError) as error:
            as_asked = self.dtype is None or self.dtype == self.own_dtype
            if as_asked and self.trace.precision is None:
                raise
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            condition = (
                f" with parameters in {self.own_dtype} and buffers as they are" if as_asked else ""
            )
            # Without a precision, the caller catches this error and verifies in the model's dtype.
            remedy = "verify in a wider dtype: pass dtype=torch.float64"
            raise PlainModelError(
                f"the plain model fails{condition}: {first_line}", remedy=remedy
            ) from error

    def _backward(self, outputs: Mapping[str, Any], answers: Mapping[str, Tensor]) -> None:
        """Run backward from the loss, or from the tangents that replace a user's loss. `answers`
        holds the tangents if only a part of the batch ran."""
        ends = [(outputs[o.path], o) for o in self.trace.differentiable]
        full_outputs = [
            None if o.path in answers else tangent_of(o.path, x.shape, x.dtype, is_loss=o.is_loss)
            for x, o in ends
        ]
        tangents = [
            (answers[o.path] if made is None else made).to(x)
            for made, (x, o) in zip(full_outputs, ends, strict=True)
        ]
        if ends:
            torch.autograd.backward([x for x, _ in ends], tangents)

    def _autocast(self) -> AbstractContextManager[Callable[[], AbstractContextManager[Any]]]:
        """Enter autocast as in capture. On a GPU the model enters it itself. Yields a function that
        returns a context outside of autocast."""
        on_gpu = any(x.is_cuda for x in (*self.tensors.values(), *self.inputs))
        return (
            nullcontext(lambda: torch.autocast("cuda", enabled=False))
            if on_gpu
            else gpu_autocast(on_gpu=False)
        )

    def _input(self, x: Any) -> Any:
        """Return a leaf of the call for the plain model. It is a copy with its own gradient if the
        user's tensor requires a gradient."""
        leaf = self._narrow(self._promote(x))
        return (
            leaf.detach().requires_grad_()
            if isinstance(x, Tensor) and x.requires_grad and self.trace.differentiable
            else leaf
        )

    def _of_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the gradients of inputs that `_input` returned, by the names that outputs and
        gradients use."""
        leaves = dict(flatten_call(args, dict(kwargs))[0])
        return {i.gradient_name: _gradient(leaves[i.path]) for i in self.trace.given_back}

    def _narrow(self, x: Any) -> Any:
        """Convert a parameter or an input to the plan's precision, unless the whole computation
        runs in another dtype."""
        return (
            x.to(narrow_dtype(x.dtype, self.trace.precision))
            if self.dtype is None and isinstance(x, Tensor)
            else x
        )

    def _promote(self, x: Any) -> Any:
        return promote(x, self.dtype)


class _LowerDtypes(TorchDispatchMode):
    """A mode that records the ops that compute in a floating dtype smaller than `dtype`, with their
    dtypes. A complex dtype counts as the dtype of its parts."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = dtype.itemsize
        self.found: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if not _computes(args, kwargs or {}) and "dtype" not in (kwargs or {}):
            name += OF_INTEGERS
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
    """Return a copy of a model. Tensor attributes other than parameters and buffers may be
    computed, as by `weight_norm`; they are detached."""
    tensor_attributes = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in tensor_attributes})


def _gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter; zeros if the loss does not depend on it."""
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
