"""`PartedOutput`: an output that every rank holds a part of, which refuses to be read as if that
part were the whole.

A DTensor's ``item()`` reads this rank's local value whatever the placements say, and torch refuses
plain tensors beside it in words of its own. What torch computes of such an output is one, too, so
that a metric of it is refused where it becomes a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from autopar.errors import RuntimeStateError
from autopar.runtime.gradients import first_derivatives_only
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
_MIXED = "mixed torch.Tensor and DTensor"  # of torch's refusal, 2.11 to 2.15


def _in_part(what: str) -> RuntimeStateError:
    """The error of an output whose part here would be taken for the whole."""
    whole = 'pass outputs="full" to autopar.compile, and outputs come whole on every rank'
    return RuntimeStateError(
        what, remedy=f"{whole}; or gather this one, on every rank: out.full_tensor()"
    )


class PartedOutput(DTensor):
    """A DTensor that its rank's part does not stand for; made by `parted` of one that is there."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """As a DTensor's, with results of this class.

        Raises:
            RuntimeStateError: where a value is read of which this rank has a part, or a plain
                tensor stands beside it.
        """
        leaves = tree_leaves((args, kwargs))
        read = func in READS or (func is Tensor.__format__ and not args[0].dim())
        if read and any(_in_parts(x) for x in leaves):
            what = (
                f"{_name(func)} of an output, or of what was computed of it, would read this rank's"
                " part alone: it is a DTensor"
            )
            raise _in_part(what)
        try:
            found = super().__torch_function__(func, types, args, kwargs or {})
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            what = f"{_name(func)} of an output, which is a DTensor, and a plain tensor"
            raise _in_part(what) from error
        given = {id(x) for x in leaves}
        for x in found if isinstance(found, tuple | list) else (found,):
            if type(x) is DTensor and id(x) not in given:
                refuse_reads(x)
        return found

    def full_tensor(self, **kwargs: Any) -> Tensor:
        """The whole tensor; every rank calls it, if it is in parts."""
        if not _in_parts(self):
            return super().full_tensor(**kwargs)
        with announced(f"gathers an output of shape {tuple(self.shape)}", self.device_mesh):
            return super().full_tensor(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved and copied as the DTensor that it is."""
        return _plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return refuse_reads(_plain(self).__deepcopy__(memo))


def refuse_reads(value: Tensor) -> Tensor:
    """The same tensor, which refuses from now on to be read in part; as it is where it is no
    DTensor."""
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
# Outputs that the plain model has a gradient of and a program has none of: whoever differentiates
# one is told so.
#
# They come as if they had a gradient, as the plain model's do, and backward through one is
# refused: detached, they would take part in a sum of losses and leave nothing in any gradient.


def refuse_backward(name: str, value: Tensor, loss: Tensor) -> Tensor:
    """The output `value`, in the same memory, whose backward is refused; as it is where the
    call's loss has no gradient either."""
    if not loss.requires_grad or value.requires_grad or not torch.is_grad_enabled():
        return value
    found: Tensor = _Refused.apply(loss, [value], name)
    return found


class _Refused(torch.autograd.Function):
    """Of a value that is no argument, since it would be a view of one then, which cannot be
    changed in place."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: list[Tensor], name: str) -> Tensor:
        ctx.name = name
        return value.pop()

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, tangent: Tensor) -> Any:
        raise RuntimeStateError(
            f"backward goes through the output {ctx.name!r}, and a program has the gradient of its"
            " loss alone",
            remedy=(
                "add up in the model's forward what is to be differentiated, and return the sum as"
                " its loss; or return a dict without an entry 'loss', of which any loss may be"
                " computed; or detach this output"
            ),
        )
