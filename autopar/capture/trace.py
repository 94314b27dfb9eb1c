"""A `Trace`: the captured model as one joint forward and backward graph in normal form.

Every node carries in ``node.meta``:
    ``val``     FakeTensor(s) of the result (global shapes),
    ``phase``   ``"forward"`` or ``"backward"``,
    ``module``  path of the module that ran it (a backward node has its forward's), ``""`` at the
                root,
    ``source``  the user's own source line, or ``""``,
    ``key``     a stable unique name: module path, op, phase and ordinal among equals.

Placeholders come in the order parameters, buffers, inputs, tangents. The graph's output is one flat
tuple: outputs first (in the order of `outputs`), then one gradient per parameter that has one (in
the order of `parameters`), then the new values of mutated buffers, then one gradient per input that
has one.

The trace of a pipeline stage is a trace like any other. What it gets from the stage before, and
hands to the stage after, are inputs and outputs that *cross*: an input that crosses may have a
gradient, which goes back; an output that crosses may have a tangent, which comes back.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch.utils.weak import TensorWeakRef

from autopar.capture.diagnostics import user_line


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable or frozen parameter, or a buffer.

    Attributes:
        name: its name in the model (the first of several where it is tied).
        aliases: further names of the same tensor.
        node: name of its placeholder.
        shape: shape as the model stores it.
        view: shape in the graph. Differs from `shape` where one stored dim is seen as several, so
            that a fused projection can be sharded by heads: stored ``[d, 3 * e]`` seen as ``[d, 3,
            e]``.
        dtype: in which it rests, and its gradient is made. compute_dtype: in which the graph reads
            it.
        gradient: index of its gradient in the graph's output tuple, or None.
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
        """Whether the graph reads it in another dtype than its stored one."""
        return self.compute_dtype != self.dtype


@dataclass(frozen=True, slots=True)
class Input:
    """A tensor of the batch, one that is made of all of it for each microbatch, or one that crosses
    from the stage before.

    Attributes:
        path: its path in (args, kwargs); the key of the node that makes it where it crosses.
        node: its placeholder.
        crosses: whether it comes from the stage before. gradient: index of its gradient in the
            graph's output tuple, or None.
        requires_grad: whether the call's asks for one, which it may not have: where no output that
            has a tangent depends on it.
        given: whether it is made of the whole batch before the first microbatch
            (`autopar.analysis.microbatches`); none of the call's.
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
    """A tensor that the model returns, or one that crosses to the stage after.

    Attributes:
        path: its path in the returned structure; the key of the node that makes it where it
            crosses.
        node: the node that makes it. is_loss: whether it is the model's loss.
        tangent: name of its tangent's placeholder, ``""`` where it has none. Of a model without a
            loss, all that has a gradient has one.
        crosses: whether it goes to the stage after. requires_grad: whether the plain model's has a
            gradient.
        whole: whether every rank wants all of it, as of the loss.
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
        """Whether its tangent comes back in the layout in which the output left, from the next
        stage or the user's loss; the tangent of the model's loss is replicated."""
        return bool(self.tangent) and not self.is_loss


@dataclass(frozen=True, slots=True, eq=False)
class Stamp:
    """Identity and version of a tensor that is not kept alive."""

    tensor: TensorWeakRef
    version: int

    def __deepcopy__(self, memo: Any) -> Stamp:
        return self

    @staticmethod
    def of(tensor: torch.Tensor) -> Stamp:
        """Return the stamp of a tensor as it is now."""
        return Stamp(TensorWeakRef(tensor), _version(tensor))

    def is_of(self, now: object) -> bool:
        """Whether `now` is the same tensor, not written since."""
        return (
            isinstance(now, torch.Tensor) and self.tensor() is now and self.version == _version(now)
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class ModuleAttribute:
    """A value that forward looked at, and that the graph holds as a constant.

    Attributes:
        path: of the module, ``""`` for the model itself. name: of the attribute, from there on:
            ``beta``, ``config.hidden_size``.
        value: an int, float, bool, str or None, as it was at the capture; a `Stamp` of a tensor
            that is neither parameter nor buffer.
    """

    path: str
    name: str
    value: int | float | bool | str | Stamp | None


@dataclass(frozen=True, slots=True)
class OutsideValue:
    """A value that forward looked at outside of the model, of a global or closure variable or of
    what one holds, a constant in the graph.

    Attributes:
        name: for people. holder: the cell, the dict or (by its name) the module that it is found
            in.
        steps: how, each an attribute or (where that is empty) a key.
        value: as of `ModuleAttribute`.
    """

    name: str
    holder: Any
    steps: tuple[tuple[str, Any], ...]
    value: int | float | bool | str | Stamp | None

    def __deepcopy__(self, memo: Any) -> OutsideValue:
        return self  # a copy of what is outside would be another


@dataclass(frozen=True, slots=True, eq=False)
class KnownBuffer:
    """A buffer whose values forward read, so that shapes or branches of the graph follow from them.

    Attributes:
        name: of the buffer in the model. value: what it held, on the CPU.
    """

    name: str
    value: torch.Tensor


Constant: TypeAlias = ModuleAttribute | OutsideValue | KnownBuffer


@dataclass(frozen=True, slots=True)
class Folding:
    """Which layers were captured a few at a time and repeated, or why none were.

    Attributes:
        runs: the repeated layers in words, one sentence part per run. refusal: why there are none,
            else ``""``.
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
        parameters, buffers, inputs, outputs: what goes in and out, in graph order.
        mutated: buffer name → index in the graph's output tuple of its new value.
        in_spec: pytree spec of (args, kwargs); out_spec: of the model's return value (leaves that
            are no tensors are kept in `constants` by flat position).
        constants: flat output position → the non-tensor leaf there.
        settings: flat input position → the non-tensor leaf there, which the graph was specialised
            to; of a tensor whose values forward reads, these.
        fingerprint: hash of model structure, shapes and dtypes.
        folding: how repeated layers were captured; the graph is the same either way.
        precision: what wider floating parameters and inputs are read in, where that was asked for.
        attributes: plain values of the model's modules, and of what these hold, that forward looked
            at (`training` left out); of layers that were repeated, the values of the layer that was
            captured in their place; the same of what no module has; and the values of buffers that
            forward read.
        code: (file, qualified name, first line) of the functions that were traced.
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

    def __deepcopy__(self, memo: Any) -> Trace:
        return self  # nothing changes it; torch warns of specs of calls that are copied

    @property
    def loss(self) -> Output | None:
        """The loss; None if the model returns none, or this is the trace of a stage before the
        last."""
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

    def node(self, name: str) -> fx.Node:
        """Return the node named `name`; raise KeyError if there is none."""
        for node in self.graph.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


# --------------------------------------------------------------------------------------------------
# Where each node comes from: phase, module path, source line and a stable key.

_LEVELS = 3  # of lists and dicts within each other
_ROOT = re.compile(r"^L\['\w+'\]\.?")
_GLOBAL = re.compile(r"G[.\[]")  # Dynamo's name of the global scope


def label(
    graph: fx.Graph,
    tangents: Collection[fx.Node] = (),
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Set ``phase``, ``module`` and ``source`` of every node from what Dynamo and AOTAutograd
    recorded.

    Sums of gradients have no recorded module; they get that of their latest labelled operand, the
    gradient that was added last. The backward of a user's autograd function has no recorded phase;
    it is in the middle of the backward, or begins it with a tangent.

    Args:
        graph: the graph to label.
        tangents: placeholders of tangents.
        elsewhere: other paths by which forward reaches a module → the path of its registration
            (`held_elsewhere`).
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
    """Return the phase of a node; that of the node before it, `before`, if none is recorded."""
    if node.op == "output" or any(operand in tangents for operand in node.all_input_nodes):
        return "backward"
    tag = node.meta.get("partitioner_tag")
    if tag is None:
        return before
    return "backward" if tag.endswith("backward") else "forward"


def recorded_module(meta: dict[str, Any]) -> str:
    """Return the path of the innermost module of the model that ran a node, as torch recorded it;
    empty for the model itself, or if torch did not record it. Global modules, such as an activation
    of the file that defines the model, are not part of the model."""
    paths = [path for path, _ in (_modules(meta) or {}).values() if not _GLOBAL.match(path)]
    return _path(paths[-1]) if paths else ""


def held_elsewhere(model: nn.Module) -> dict[str, str]:
    """Return paths of modules in Python lists and dicts (``blocks.0``) → the paths of their
    registration."""
    registered = {id(module): path for path, module in model.named_modules()}
    found: dict[str, str] = {}

    def look(value: Any, path: str, depth: int) -> None:
        """Record the modules in a value, and in lists and dicts within it.

        Args:
            value: an attribute, or an item of one.
            path: by which forward reaches it.
            depth: levels of lists and dicts that are still searched.
        """
        if isinstance(value, nn.Module) and id(value) in registered:
            found[path] = registered[id(value)]
        elif isinstance(value, (list, tuple, dict)) and depth:
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                look(item, f"{path}.{key}", depth - 1)

    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_"):
                look(value, f"{prefix}.{name}".lstrip("."), _LEVELS)
    return found


def _registered_path(path: str, elsewhere: Mapping[str, str]) -> str:
    prefix = path if elsewhere else ""
    while prefix and prefix not in elsewhere:
        prefix = prefix.rpartition(".")[0]
    return elsewhere[prefix] + path[len(prefix) :] if prefix else path


def _modules(meta: dict[str, Any]) -> Any:
    return meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")


def assign_keys(graph: fx.Graph) -> None:
    """Set ``key`` of every node: ``module/op/phase/ordinal``; the ordinal counts equal nodes in
    graph order."""
    seen: Counter[str] = Counter()
    for node in graph.nodes:
        stem = f"{node.meta['module']}/{op_name(node)}/{node.meta['phase']}"
        node.meta["key"] = f"{stem}/{seen[stem]}"
        seen[stem] += 1


def op_name(node: fx.Node) -> str:
    """Return the op without namespace and ``.default``: ``dot``, ``add.Tensor``, ``silu``,
    ``placeholder``."""
    if node.op != "call_function":
        return node.op
    if hasattr(node.target, "overloadpacket"):
        return str(node.target).split(".", 1)[1].removesuffix(".default")
    return node.target.__name__


def _path(dynamo_path: str) -> str:
    """Return the model's own path for Dynamo's: ``model.layers.0`` for ``L['self'].model.layers.0``
    or ``L['self']._modules['model'].layers.0``, or ``L['self'].__dict__['_modules']['model']...``
    of a model with a ``__getattr__`` of its own."""
    path = re.sub(r"\.?__dict__\['_modules'\]", "._modules", _ROOT.sub("", dynamo_path))
    path = re.sub(r"(?:\._modules)?\['?([^'\]]+)'?\]", r".\1", path)
    return path.lstrip(".")
