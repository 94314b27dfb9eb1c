"""`Call`: the application of an op, independent of FX."""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar import ops
from autopar.errors import Where
from autopar.rules import Call, Operand, TensorInfo, call_of, call_on, operands_of
from autopar.rules.call import NO_TENSOR, KeyedCall, argument, op_name, slots

aten = torch.ops.aten
F32 = torch.float32


def placeholder(graph: fx.Graph, name: str, *shape: int) -> fx.Node:
    node = graph.placeholder(name)
    node.meta["val"] = torch.empty(shape)
    return node


def test_operands_are_numbered_in_order_including_repeats() -> None:
    graph = fx.Graph()
    x, y = placeholder(graph, "x", 2, 3), placeholder(graph, "y", 2, 1)
    node = graph.call_function(aten.cat.default, ([x, y, x], 1))
    node.meta |= {"val": torch.empty(2, 7), "module": "m", "source": "f.py:1: cat"}
    call = call_of(node)
    assert call.args == ((Operand(0), Operand(1), Operand(2)), 1)
    assert operands_of(node) == (x, y, x)
    assert call.inputs == (
        TensorInfo((2, 3), F32),
        TensorInfo((2, 1), F32),
        TensorInfo((2, 3), F32),
    )
    assert call.outputs == (TensorInfo((2, 7), F32),)
    assert (call.where.op, call.where.module, call.where.source) == (
        "aten.cat.default",
        "m",
        "f.py:1: cat",
    )


def test_getitem_has_the_selected_result_as_its_only_operand() -> None:
    graph = fx.Graph()
    parts = graph.call_function(aten.split.Tensor, (placeholder(graph, "x", 5), 3))
    parts.meta["val"] = [torch.empty(3), torch.empty(2)]
    selected = graph.call_function(operator.getitem, (parts, 1))
    selected.meta["val"] = torch.empty(2)
    assert call_of(parts).outputs == (TensorInfo((3,), F32), TensorInfo((2,), F32))
    assert call_of(selected).inputs == call_of(selected).outputs == (TensorInfo((2,), F32),)
    assert operands_of(selected) == (parts,)


def test_none_results_keep_their_position() -> None:
    call, _ = call_on(aten.neg.default, (torch.ones(2),), {}, (torch.ones(2), None, torch.ones(3)))
    assert call.outputs == (TensorInfo((2,), F32), NO_TENSOR, TensorInfo((3,), F32))


def test_slots_map_tensor_parameters_to_operands() -> None:
    x, w = torch.ones(2, 3), torch.ones(3)
    call, _ = call_on(aten.native_layer_norm.default, (x, [3], None, w, 1e-5), {}, (x, x, x))
    assert slots(call) == (0, None, 1)
    assert argument(call, "eps") == 1e-5 and argument(call, "bias") == Operand(1)
    scalar, _ = call_on(aten.add.Tensor, (x, 2.0), {"alpha": 3}, x)
    assert slots(scalar) == (0, None) and argument(scalar, "alpha") == 3


def test_equal_calls_at_different_source_locations_share_a_key() -> None:
    x = torch.ones(2, 3)
    call, _ = call_on(aten.neg.default, (x,), {}, x)
    elsewhere = Call(
        call.target,
        call.args,
        call.kwargs,
        call.inputs,
        call.outputs,
        Where("aten.neg.default", "there"),
    )
    other, _ = call_on(aten.neg.default, (x.double(),), {}, x.double())
    assert (
        KeyedCall(call) == KeyedCall(elsewhere)
        and len({KeyedCall(call), KeyedCall(elsewhere)}) == 1
    )
    assert KeyedCall(call) != KeyedCall(other)


def test_op_names_are_readable() -> None:
    assert op_name(aten.mm.default) == "aten.mm.default"
    assert op_name(ops.dot) == "ops.dot"
    assert op_name(operator.getitem) == "operator.getitem"


def test_call_of_a_node_is_cached_but_not_copied_with_the_node() -> None:
    graph, larger = fx.Graph(), fx.Graph()
    node = graph.call_function(aten.relu.default, (placeholder(graph, "x", 2),))
    node.meta["val"] = torch.empty(2)
    call = call_of(node)
    copy = larger.node_copy(node, {node.args[0]: placeholder(larger, "x", 3)}.__getitem__)
    copy.meta["val"] = torch.empty(3)
    assert call_of(node) is call and call.keyed is call.keyed
    assert call_of(copy).outputs == (TensorInfo((3,), F32),)
