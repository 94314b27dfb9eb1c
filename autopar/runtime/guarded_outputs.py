"""`PartedOutput`: a distributed output that raises an error if this rank's shard is read as the
full tensor.

``item()`` of a DTensor reads this rank's local value for all placements. torch raises an unclear
error if DTensors and plain tensors are mixed. Results computed from a `PartedOutput` have the same
class, so a metric raises an error where it is converted to a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar.errors import RuntimeStateError
from autopar.runtime.backward import first_derivatives_only
from autopar.runtime.rank_agreement import announced

READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.is_nonzero,
        Tensor.allclose,
        Tensor.__bool__,
        Tensor.__float__,
        Tensor.__int__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__array__,
        Tensor.__contains__,
        Tensor.equal,
        torch.is_nonzero,
        torch.allclose,
        torch.equal,
    }
)
_MIXED = "mixed torch.Tensor and DTensor"  # part of torch's message, 2.11 to 2.15


def _in_part(what: str) -> RuntimeStateError:
    """Return the error for reading a shard of an output as the full tensor."""
    remedy_full = (
        'pass outputs="full" to autopar.compile, so that every rank returns the full outputs'
    )
    return RuntimeStateError(
        what, remedy=f"{remedy_full}; or gather this output on every rank: out.full_tensor()"
    )


class PartedOutput(DTensor):
    """A DTensor whose values cannot be read from one shard. `refuse_reads` converts a DTensor in
    place."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch like a DTensor. Results are of this class.

        Raises:
            RuntimeStateError: if a value is read of which this rank has only a shard, or DTensors
                and plain tensors are mixed.
        """
        leaves = tree_leaves((args, kwargs))
        read = func in READS or (func is Tensor.__format__ and not args[0].dim())
        if read and any(_in_parts(x) for x in leaves):
            message = (
                f"{_name(func)} of an output, or of a value computed from it, would read only this"
                " rank's shard: the output is a DTensor"
            )
            raise _in_part(message)
        try:
            result = super().__torch_function__(func, types, args, kwargs or {})
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            message = f"{_name(func)} mixes an output, which is a DTensor, with a plain tensor"
            raise _in_part(message) from error
        argument_ids = {id(x) for x in leaves}
        for x in result if isinstance(result, tuple | list) else (result,):
            if type(x) is DTensor and id(x) not in argument_ids:
                refuse_reads(x)
        return result

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """Return the full tensor. Every rank must call this, unless the tensor is replicated."""
        if not _in_parts(self):
            return super().full_tensor(**kwargs)
        with announced(f"gathers an output of shape {tuple(self.shape)}", self.device_mesh):
            return super().full_tensor(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy the tensor as a plain DTensor."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return refuse_reads(_plain(self).__deepcopy__(memo))


def refuse_reads(value: Tensor) -> Tensor:
    """Convert a DTensor to a `PartedOutput` in place, and return it. Other tensors are returned
    unchanged."""
    if type(value) is DTensor:
        value.__class__ = PartedOutput
    return value


def _plain(value: DTensor) -> DTensor:
    return DTensor.from_local(
        value._local_tensor,
        value.device_mesh,
        value.placements,
        shape=value.shape,
        stride=value.stride(),
    )


def _in_parts(value: Any) -> bool:
    if not isinstance(value, PartedOutput):
        return False
    return any(
        size > 1 and not placement.is_replicate()
        for size, placement in zip(value.device_mesh.shape, value.placements, strict=True)
    )


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func)).strip("_")


# --------------------------------------------------------------------------------------------------
# Outputs that have a gradient in the plain model but not in a program. Backward through them raises
# an error.
#
# They require a gradient as in the plain model. If they were detached, a sum of losses could
# include them without any contribution to the gradients.


def refuse_backward(name: str, value: Tensor, loss: Tensor) -> Tensor:
    """Return an output, in the same memory, through which backward raises an error. The output is
    unchanged if the loss of the call has no gradient.

    Args:
        name: the name of the output, for error messages.
        value: the output.
        loss: the loss of the same call.
    """
    if not loss.requires_grad or value.requires_grad or not torch.is_grad_enabled():
        return value
    refused: Tensor = _Refused.apply(loss, [value], name)
    return refused


class _Refused(torch.autograd.Function):
    """An autograd function whose backward raises an error. The value is passed in a list, since the
    result would otherwise be a view of an input, which cannot be changed in place."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: list[Tensor], name: str) -> Tensor:
        """Return the value.

        Args:
            loss: the loss; since it requires a gradient, so does the result.
            value: a list that contains only the value. The list is emptied.
            name: the name of the output, for error messages.
        """
        ctx.name = name
        return value.pop()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, tangent: Tensor) -> Any:
        """Raise RuntimeStateError."""
        raise RuntimeStateError(
            f"backward runs through the output {ctx.name!r}, but a program computes only the"
            " gradient of its loss",
            remedy=(
                "sum everything to differentiate in the model's forward and return the sum as the"
                " loss; or return a dict without an entry 'loss', so that the loss is computed"
                " outside; or detach this output"
            ),
        )
