"""A `Trace`: the captured model as one joint forward and backward graph in normal form.

Every node carries in ``node.meta``:
    ``val``     FakeTensor(s) of the result (global shapes),
    ``phase``   ``"forward"`` or ``"backward"``,
    ``module``  path of the module that ran it (for a backward node, that of its forward), ``""``
                for the model itself,
    ``source``  the line of the user's source code, or ``""``,
    ``key``     a stable unique name: module path, op, phase, and index among nodes with the same.

Placeholders are in the order parameters, buffers, inputs, tangents. The output of the graph is one
flat tuple: the outputs (in the order of `outputs`), one gradient per parameter that has one (in the
order of `parameters`), the new values of mutated buffers, and one gradient per input that has one.

A pipeline stage has a trace of the same form. The tensors that it receives from the previous stage
and sends to the next stage are inputs and outputs that *cross*. An input that crosses may have a
gradient, which is sent back. An output that crosses may have a tangent, which is received.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import fx, nn
from torch.utils.weak import TensorWeakRef

from autopar.capture.diagnostics import user_line
from autopar.core import torch_state
from autopar.errors import Where


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable or frozen parameter, or a buffer.

    Attributes:
        name: its name in the model; the first name of a tied parameter.
        aliases: other names of the same tensor.
        node: name of its placeholder.
        shape: shape in the model.
        view: shape in the graph. It differs from `shape` if the graph splits a stored dim, so that
            a fused projection can be sharded by heads: stored ``[d, 3 * e]``, viewed as ``[d, 3,
            e]``.
        dtype: dtype in which it is stored, and of its gradient.
        requires_grad: whether it requires a gradient.
        gradient: index of its gradient in the output tuple of the graph, or None.
        compute_dtype: dtype in which the graph reads it.
    """

    name: str
    aliases: tuple[str, ...]
    node: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    gradient: int | None
    compute_dtype: torch.dtype

    @property
    def is_narrowed(self) -> bool:
        """Whether the graph reads it in a dtype other than the stored one."""
        return self.compute_dtype != self.dtype


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch, one computed from the full batch for each microbatch, or one that
    crosses from the previous stage.

    Attributes:
        path: its path in (args, kwargs); if it crosses, the key of the node that computes it.
        node: name of its placeholder.
        shape: its shape.
        dtype: its dtype.
        crosses: whether it is received from the previous stage.
        gradient: index of its gradient in the output tuple of the graph, or None.
        requires_grad: whether the tensor of the call requires a gradient. It has none if no output
            with a tangent depends on it.
        given: whether it is computed from the full batch before the first microbatch
            (`autopar.analysis.microbatches`) and is not an argument of the call.
    """

    path: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    crosses: bool = False
    gradient: int | None = None
    requires_grad: bool = False
    given: bool = False

    @property
    def gradient_name(self) -> str:
        """Name of its gradient among the gradients of parameters."""
        return gradient_name(self.path)


def gradient_name(path: str) -> str:
    """Return the name of an input's gradient among the gradients of parameters."""
    return f"input {path!r}"


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that the model returns, or one that crosses to the next stage.

    Attributes:
        path: its path in the returned structure; if it crosses, the key of the node that computes
            it.
        node: name of the node that computes it.
        shape: its shape.
        dtype: its dtype.
        is_loss: whether it is the loss of the model.
        tangent: name of the placeholder of its tangent, ``""`` if it has none. In a model without a
            loss, every output that requires a gradient has a tangent.
        crosses: whether it is sent to the next stage.
        requires_grad: whether this output of the plain model requires a gradient.
        whole: whether every rank returns the full tensor, as it does the loss.
    """

    path: str
    node: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_loss: bool
    tangent: str = ""
    crosses: bool = False
    requires_grad: bool = False
    whole: bool = False

    @property
    def is_answered(self) -> bool:
        """Whether its tangent, from the next stage or the user's loss, has the layout of the
        output; the tangent of the model's loss is replicated."""
        return bool(self.tangent) and not self.is_loss


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """Identity and version of a tensor, without a strong reference to it."""

    tensor: TensorWeakRef
    version: int

    def __deepcopy__(self, memo: Any) -> Stamp:
        return self

    @staticmethod
    def of(tensor: torch.Tensor) -> Stamp:
        """Return the stamp of a tensor in its current version."""
        return Stamp(TensorWeakRef(tensor), _version(tensor))

    def is_of(self, now: object) -> bool:
        """Return whether `now` is the same tensor and was not written to."""
        return (
            isinstance(now, torch.Tensor) and self.tensor() is now and self.version == _version(now)
        )


@dataclass(frozen=True, slots=True)
class ArrayStamp:
    """The type and a checksum of the contents of a NumPy array."""

    dtype: str
    shape: tuple[int, ...]
    checksum: int

    @staticmethod
    def of(array: np.ndarray) -> ArrayStamp:
        """Return the stamp of an array with its current contents."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return ArrayStamp(array.dtype.str, array.shape, zlib.crc32(data.data))

    def is_of(self, now: object) -> bool:
        """Return whether `now` is an array with these contents."""
        return isinstance(now, np.ndarray) and ArrayStamp.of(now) == self


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class ModuleAttribute:
    """A value of a module that forward reads and that is a constant in the graph.

    Attributes:
        path: path of the module, ``""`` for the model itself.
        name: access path from the module: ``beta``, ``config.hidden_size``.
        value: the value during the capture: a plain value (`autopar.core.same_values.is_plain`), or
            the `Stamp` of a tensor that is neither a parameter nor a buffer, or the `ArrayStamp` of
            an array.
    """

    path: str
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class OutsideValue:
    """A value outside the model that forward reads and that is a constant in the graph: a global or
    closure variable, or an attribute or item of one.

    Attributes:
        name: name in messages.
        holder: the closure cell, the dict, or the name of the Python module that contains it.
        steps: (attribute, key) pairs that lead from the holder to the value; the attribute of a
            key is ``""``.
        value: as in `ModuleAttribute`.
    """

    name: str
    holder: Any
    steps: tuple[tuple[str, Any], ...]
    value: Any

    def __deepcopy__(self, memo: Any) -> OutsideValue:
        return self  # a copy would refer to another holder

    @property
    def is_gradient_mode(self) -> bool:
        """Whether this is the result of `torch.is_grad_enabled`, which differs between calls."""
        return bool(self.holder == torch_state.__name__)


@dataclass(frozen=True, slots=True, eq=False)
class KnownBuffer:
    """A buffer whose values forward reads, and which determine shapes or branches of the graph.

    Attributes:
        name: name of the buffer in the model.
        value: its values during the capture, on the CPU.
    """

    name: str
    value: torch.Tensor


Constant: TypeAlias = ModuleAttribute | OutsideValue | KnownBuffer


@dataclass(frozen=True, slots=True)
class Folding:
    """Which equal layers were captured once and repeated in the graph, or why none were.

    Attributes:
        runs: a description of each run of repeated layers.
        refusal: why no layers were repeated, else ``""``.
    """

    runs: tuple[str, ...] = ()
    refusal: str = ""

    def __str__(self) -> str:
        return f"folded: {'; '.join(self.runs)}" if self.runs else f"in full: {self.refusal}"


@dataclass(frozen=True, slots=True)
class Trace:
    """The captured model.

    Attributes:
        graph: the joint graph in normal form.
        parameters: the parameters, in graph order.
        buffers: the buffers, in graph order.
        inputs: the input tensors, in graph order.
        outputs: the output tensors, in graph order.
        mutated: buffer name → index of its new value in the output tuple of the graph.
        in_spec: pytree spec of (args, kwargs).
        out_spec: pytree spec of the return value of the model.
        constants: flat output position → the non-tensor leaf.
        settings: flat input position → the non-tensor leaf that the graph is specialized to, or the
            values of a tensor that forward reads.
        fingerprint: hash of the structure of the model, shapes and dtypes.
        folding: how repeated layers were captured; the graph does not depend on it.
        precision: dtype in which wider floating parameters and inputs are read; None if none was
            requested.
        attributes: values that forward reads and that are constants in the graph: attributes of
            modules except `training` (for repeated layers, those of the captured layer), values
            outside the model, and buffers.
        code: (file, qualified name, first line) of the functions that were traced.
        value_reads: flat position of an input → the place at which forward reads its values.
    """

    graph: fx.Graph
    parameters: tuple[Parameter, ...]
    buffers: tuple[Parameter, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    mutated: Mapping[str, int]
    in_spec: Any
    out_spec: Any
    constants: Mapping[int, Any]
    settings: Mapping[int, Any]
    fingerprint: str
    folding: Folding = Folding()
    precision: torch.dtype | None = None
    attributes: tuple[Constant, ...] = ()
    code: tuple[tuple[str, str, int], ...] = ()
    value_reads: Mapping[int, Where] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> Trace:
        return self  # a trace is immutable, and torch warns when pytree specs are copied

    @property
    def loss(self) -> Output | None:
        """The loss; None if the model returns none, or for a stage before the last."""
        return next((o for o in self.outputs if o.is_loss), None)

    @property
    def differentiable(self) -> tuple[Output, ...]:
        """The outputs that have a tangent, in the order of the tangents' placeholders."""
        return tuple(o for o in self.outputs if o.tangent)

    @property
    def given_back(self) -> tuple[Input, ...]:
        """The inputs of the batch that have a gradient."""
        return tuple(i for i in self.inputs if i.gradient is not None and not i.crosses)

    @property
    def batch_in_words(self) -> tuple[tuple[str, str], ...]:
        """(path, dtype and shape) of each input of the call: ``("x", "float32 [8, 16]")``."""
        return tuple(
            (i.path, f"{str(i.dtype).removeprefix('torch.')} {list(i.shape)}")
            for i in self.inputs
            if not i.given
        )

    def nodes_by_name(self) -> dict[str, fx.Node]:
        """Return all nodes by their names."""
        return {node.name: node for node in self.graph.nodes}

    def node(self, name: str) -> fx.Node:
        """Return the node named `name`; raise KeyError if there is none."""
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


# --------------------------------------------------------------------------------------------------
# Metadata of nodes: phase, module path, source line and a stable key.

_LEVELS = 3  # depth of nested lists and dicts that are searched for modules
_ROOT = re.compile(r"^L\['\w+'\]\.?")
_GLOBAL = re.compile(r"G[.\[]")  # Dynamo's prefix of global variables


def label(
    graph: fx.Graph,
    tangents: Collection[fx.Node] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Set ``phase``, ``module`` and ``source`` of every node from the metadata of Dynamo and
    AOTAutograd.

    Sums of gradients have no recorded module; they get that of their last labelled operand, which
    is the gradient that was added last. The backward of a custom autograd function has no recorded
    phase; its nodes are between backward nodes, or read a tangent.

    Args:
        graph: the graph to label.
        tangents: placeholders of tangents.
        elsewhere: other paths by which forward accesses a module → the path under which the module
            is registered (`held_elsewhere`).
    """
    order: dict[fx.Node, int] = {}
    phase = "forward"
    for position, node in enumerate(graph.nodes):
        order[node] = position
        meta = node.meta
        phase = _phase_of(node, tangents, phase)
        module = _registered_path(recorded_module(meta), elsewhere)
        source = user_line(meta.get("stack_trace") or "")
        if not _modules(meta) and phase == "backward" and node.op == "call_function":
            calls = (x for x in node.all_input_nodes if x.op == "call_function")
            if nearest := max(calls, key=order.__getitem__, default=None):
                module, source = nearest.meta["module"], source or nearest.meta["source"]
        node.meta = {
            "phase": phase,
            "module": module,
            "source": source,
            **({"val": meta["val"]} if "val" in meta else {}),
        }


def _phase_of(node: fx.Node, tangents: Collection[fx.Node], before: str) -> str:
    """Return the phase of a node; if none is recorded, return `before`, the phase of the previous
    node."""
    if node.op == "output" or any(operand in tangents for operand in node.all_input_nodes):
        return "backward"
    tag = node.meta.get("partitioner_tag")
    if tag is None:
        return before
    return "backward" if tag.endswith("backward") else "forward"


def recorded_module(meta: dict[str, Any]) -> str:
    """Return the recorded path of the innermost module of the model that ran a node; empty for the
    model itself, or if none is recorded.

    Modules in global variables, such as an activation in the file that defines the model, are not
    part of the model.

    Args:
        meta: metadata of the node, as torch recorded it.
    """
    paths = [path for path, _ in (_modules(meta) or {}).values() if not _GLOBAL.match(path)]
    return _path(paths[-1]) if paths else ""


def held_elsewhere(model: nn.Module) -> dict[str, str]:
    """Return the paths of modules in Python lists and dicts (``blocks.0``) → the paths under which
    they are registered."""
    registered = {id(module): path for path, module in model.named_modules()}
    other_paths: dict[str, str] = {}

    def look(value: Any, path: str, depth: int) -> None:
        """Record the modules in a value, and in lists and dicts within it.

        Args:
            value: an attribute, or an item of one.
            path: path by which forward accesses it.
            depth: remaining levels of lists and dicts to search.
        """
        if isinstance(value, nn.Module) and id(value) in registered:
            other_paths[path] = registered[id(value)]
        elif isinstance(value, (list, tuple, dict)) and depth:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(item, f"{path}.{key}", depth - 1)

    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                look(value, f"{prefix}.{name}".lstrip("."), _LEVELS)
    return other_paths


def _registered_path(path: str, elsewhere: Mapping[str, str]) -> str:
    prefix = path if elsewhere else ""
    while prefix and prefix not in elsewhere:
        prefix = prefix.rpartition(".")[0]
    return elsewhere[prefix] + path[len(prefix) :] if prefix else path


def _modules(meta: dict[str, Any]) -> Any:
    return meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")


CAPTURED_KEY = "captured_key"
"""Metadata of the nodes of a rewritten graph: the key that a node had in the captured graph."""
OF_BATCH = "/of the batch"
"""Suffix of the keys of nodes that only the graph of a microbatch has: values of the batch, and
products with the number of microbatches (`autopar.analysis.microbatches`)."""


def assign_keys(graph: fx.Graph) -> None:
    """Set ``key`` of every node to ``module/op/phase/index``; the index counts nodes with the same
    module, op and phase in graph order.

    Nodes with the suffix `OF_BATCH` are not counted. The key of such a product follows that of its
    operand.
    """
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        if str(node.meta.get("key", "")).endswith(OF_BATCH):
            node.meta["key"] = next(
                (f"{operand.meta['key']}{OF_BATCH}" for operand in node.all_input_nodes),
                node.meta["key"],
            )
            continue
        stem = f"{node.meta['module']}/{op_name(node)}/{node.meta['phase']}"
        node.meta["key"] = f"{stem}/{counts[stem]}"
        counts[stem] += 1


def op_name(node: fx.Node) -> str:
    """Return the name of the op without namespace and ``.default``, such as ``dot``,
    ``add.Tensor``, ``silu`` or ``placeholder``."""
    if node.op != "call_function":
        return node.op
    if hasattr(node.target, "overloadpacket"):
        return str(node.target).split(".", 1)[1].removesuffix(".default")
    return node.target.__name__


def _path(dynamo_path: str) -> str:
    """Return the module path for a path of Dynamo.

    ``model.layers.0`` is the module path of ``L['self'].model.layers.0``, of
    ``L['self']._modules['model'].layers.0``, and, in a model that defines ``__getattr__``, of
    ``L['self'].__dict__['_modules']['model'].layers.0``.
    """
    path = re.sub(r"\.?__dict__\['_modules'\]", "._modules", _ROOT.sub("", dynamo_path))
    path = re.sub(r"(?:\._modules)?\['?([^'\]]+)'?\]", r".\1", path)
    return path.lstrip(".")
