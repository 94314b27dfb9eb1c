"""Replace calls of `flex_attention` with one op, `autopar.ops.flex_attention`, whose score and mask
functions are text.

Dynamo traces a call, including calls of ``torch.compile(flex_attention)``, as a higher-order op
with a graph for each function. These graphs are traced to ATen ops and written as text
(`autopar.ops.score_functions`). The tensors of a block mask are omitted: they list the blocks that
a kernel may skip, and the mask function defines the same mask per element. When a model runs on
fake tensors outside of Dynamo, `flex_attention` runs as plain ATen ops: torch would compile it, and
the compiled code would access memory that is not allocated.
"""

from __future__ import annotations

import contextlib
import math
import operator
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import flex_attention as higher_order
from torch._higher_order_ops.flex_attention import math_attention
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.experimental import _paged_attention as paged

from autopar import ops
from autopar.capture.diagnostics import of_flex_attention, user_line
from autopar.ops.score_functions import SEEN, UnwritableError, write_function

_SUPPORTED_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BACKEND": "AUTO",
}  # options that change results → the only supported value
_FREE = 1 << 30  # block size of a block mask that hides nothing
SCALARS = ("score", "b", "h", "q", "k")
_SETTLED = ((0, 0, 0), (), ())  # start offsets, sharded dims and heads of an unsharded call
_OPTIONS_REMEDY = (
    "remove the option; options that only tune a kernel (block sizes, warps, stages) are ignored"
    " and may remain"
)
_aten = torch.ops.aten
_COPIES = frozenset(
    (_aten.lift_fresh_copy.default, _aten.detach.default, _aten.alias.default, _aten.clone.default)
)
_FILLING: dict[
    Any, Any
] = {  # op → value that it fills a tensor with, or "@" and the position of that argument
    **dict.fromkeys((_aten.new_ones.default, _aten.ones_like.default, _aten.ones.default), True),
    **dict.fromkeys(
        (_aten.new_zeros.default, _aten.zeros_like.default, _aten.zeros.default), False
    ),
    **dict.fromkeys((_aten.full_like.default, _aten.full.default), "@1"),
    _aten.new_full.default: "@2",
    _aten.scalar_tensor.default: "@0",
}
_NESTED_REMEDY = (
    "call flex_attention in the model's own forward, outside of other higher-order calls"
)


@contextlib.contextmanager
def flex_attention_on_cpu() -> Iterator[None]:
    """Allow torch's functions to run and be captured on the CPU with gradients; refuse paged
    caches."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torchs, "_validate_device", lambda *_: None))
        stack.enter_context(mock.patch.object(torchs, "_apply_kernel_options", _with_options))
        for name in ("assign", "convert_logical_block_mask"):
            stack.enter_context(mock.patch.object(paged.PagedAttention, name, _refuse_pages))
        yield


@contextlib.contextmanager
def run_uncompiled() -> Iterator[None]:
    """Run functions that the model passes to torch.compile without compiling them."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def flex_attention_eager() -> Iterator[None]:
    """Run calls of `flex_attention` with torch's dense reference implementation, which computes the
    gradients of all captured tensors."""
    written = {"flex_attention_hop": math_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}
    with flex_attention_on_cpu(), run_uncompiled(), mock.patch.multiple(torchs, **written):
        yield


_apply_options = torchs._apply_kernel_options


def _with_options(
    q: Any, k: Any, v: Any, return_lse: Any, options: Any, return_aux: Any = None
) -> Any:
    if return_aux is not None and return_aux.max_scores:
        remedy = "request only lse: return_aux=AuxRequest(lse=True)"
        raise of_flex_attention(
            "requests max_scores", user_line("".join(traceback.format_stack())), remedy
        )
    return _apply_options(q, k, v, return_lse, options, return_aux)


def _refuse_pages(*_: Any, **__: Any) -> NoReturn:
    remedy = "pass keys and values as plain tensors, without a paged cache"
    raise of_flex_attention(
        "uses a paged cache", user_line("".join(traceback.format_stack())), remedy
    )


def join_flex_attention(graph: fx.Graph) -> None:
    """Replace each call in a graph of torch functions and in its subgraphs.

    Raises:
        CaptureError: a function cannot be written as text, or an option changes results.
    """
    owner = graph.owning_module
    assert owner is not None, "graphs of Dynamo have an owning module"
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is higher_order:
            _join(node, owner)
        elif node.op == "get_attr" and not any(user.target is higher_order for user in node.users):
            inner = _attribute(owner, node)
            if isinstance(inner, fx.GraphModule):
                join_flex_attention(inner.graph)
    owner.recompile()


def refuse_flex_attention(graph: fx.Graph) -> None:
    """Raise CaptureError at a remaining call, which is within another higher-order op."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "").startswith("flex_attention") and isinstance(
            node.target, torch._ops.HigherOrderOperator
        ):
            raise of_flex_attention(
                "is called within another higher-order call", _source(node), _NESTED_REMEDY
            )


def _attribute(owner: Any, node: fx.Node) -> Any:
    for name in str(node.target).split("."):
        owner = getattr(owner, name)
    return owner


def _source(node: fx.Node) -> str:
    return user_line(str(node.meta.get("stack_trace", "")))


def _join(node: fx.Node, owner: Any) -> None:
    q, k, v, score, block_mask, scale, options, of_score, of_mask = node.args
    _check(node, options)
    captured = list(dict.fromkeys((*of_score, *of_mask)))
    if not all(
        isinstance(each, fx.Node) and isinstance(each.meta.get("example_value"), torch.Tensor)
        for each in captured
    ):
        raise of_flex_attention(
            "has a function that reads a value that is not a tensor of fixed shape",
            _source(node),
            "pass the value as a tensor",
        )
    mask = block_mask[-1]
    try:
        texts = [
            text_of(
                _attribute(owner, function),
                names,
                _example(q).dtype,
                {captured.index(x): _example(x) for x in reads},
            )
            for function, names, reads in ((score, SCALARS, of_score), (mask, SCALARS[1:], of_mask))
        ]
    except UnwritableError as error:
        raise of_flex_attention(
            f"has an unsupported function: {error.what}", _source(node), error.remedy
        ) from error
    if texts[1] == SEEN and min(block_mask[-3:-1]) < _FREE:
        remedy = (
            "create the block mask with create_block_mask, or pass BlockMask.from_kv_blocks a"
            " mask_mod that hides the elements outside its blocks"
        )
        raise of_flex_attention(
            "has a block mask whose mask function hides nothing", _source(node), remedy
        )
    graph = node.graph
    with graph.inserting_before(node):
        joined = graph.call_function(
            ops.flex_attention, (q, k, v, captured, *texts, float(scale), *_SETTLED)
        )
        joined.meta = {name: value for name, value in node.meta.items() if name != "example_value"}
        joined.meta["example_value"] = node.meta["example_value"][:2]
    for user in list(node.users):
        _replace_result(user, joined)
    graph.erase_node(node)


def _example(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["example_value"]
    return value


def _check(node: fx.Node, options: dict[str, Any]) -> None:
    for name, value in options.items():
        due = _SUPPORTED_OPTIONS.get(name.removeprefix("fwd_").removeprefix("bwd_"), value)
        if value != due:
            raise of_flex_attention(
                f"has kernel_options that change its results ({name}={value!r})",
                _source(node),
                _OPTIONS_REMEDY,
            )


def _replace_result(getitem: fx.Node, joined: fx.Node) -> None:
    """Replace a result of the higher-order op with that of the new op; the higher-order op returns
    the logsumexp to base 2."""
    assert getitem.target is operator.getitem and getitem.args[1] in (
        0,
        1,
        2,
    ), "Dynamo unpacks the results"
    graph, number = getitem.graph, getitem.args[1]
    if number == 2:
        assert not getitem.users, "calls that request max_scores are refused"
        graph.erase_node(getitem)
        return
    getitem.args = (joined, number)
    if number == 1 and getitem.users:
        with graph.inserting_after(getitem):
            scaled = graph.call_function(torch.mul, (getitem, 1 / math.log(2)))
        scaled.meta = dict(getitem.meta)
        getitem.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def text_of(
    function: Any, scalars: Sequence[str], dtype: torch.dtype, reads: Mapping[int, torch.Tensor]
) -> str:
    """Write a function of scalars and captured tensors as text.

    Args:
        function: the function.
        scalars: names of its first arguments; ``score`` has dtype `dtype`, the others are integers.
        dtype: dtype of the scores.
        reads: index of each captured tensor → an example of it, in the order of the arguments after
            the scalars.

    Raises:
        UnwritableError: the function cannot be written as text.
    """
    examples = [
        torch.zeros((), dtype=dtype if name == "score" else torch.int32) for name in scalars
    ]
    tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in reads.values()]
    try:
        with torch.no_grad(), TransformGetItemToIndex():
            traced = make_fx(function)(*examples, *tensors)
    except UnwritableError:
        raise
    except Exception as error:  # torch raises errors of many classes here
        reason = next(
            (line for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        message = f"torch cannot trace it for one score: {reason}"
        raise UnwritableError(
            message, remedy="write it with torch's elementwise functions (add, mul, exp, where)"
        ) from error
    _write_out_numbers(traced)
    traced.graph.eliminate_dead_code()
    return write_function(traced.graph, scalars, list(reads))


def _write_out_numbers(traced: fx.GraphModule) -> None:
    """Replace tensors that contain one number, however they are created, with one op without
    operands."""
    for node in list(traced.graph.nodes):
        if node.target in _COPIES:
            node.replace_all_uses_with(node.args[0])
            continue
        number = _number_of(_attribute(traced, node)) if node.op == "get_attr" else _fill_of(node)
        if number is not None:
            value, dtype, size = number
            value = bool(value) if dtype == torch.bool else value
            with traced.graph.inserting_before(node):
                settings = {"dtype": dtype, "device": torch.device("cpu")}
                node.replace_all_uses_with(
                    traced.graph.call_function(_aten.full.default, (list(size), value), settings)
                )


def _fill_of(node: fx.Node) -> tuple[Any, torch.dtype, tuple[int, ...]] | None:
    """Return the value, dtype and size of a tensor that a node fills; None for other ops."""
    position = _FILLING.get(node.target)
    if position is None:
        return None
    filled = node.meta["val"]
    return (
        position if isinstance(position, bool) else node.args[int(position[1:])],
        filled.dtype,
        tuple(filled.shape),
    )


def _number_of(value: Any) -> tuple[Any, torch.dtype, tuple[int, ...]] | None:
    constant = getattr(value, "constant", value)
    if (
        not isinstance(constant, torch.Tensor)
        or constant.numel() != 1
        or constant.dim()
        or isinstance(constant, torch._subclasses.FakeTensor)
    ):
        return None
    with torch.utils._python_dispatch._disable_current_modes():
        return constant.item(), constant.dtype, ()
