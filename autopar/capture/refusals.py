"""Why a model cannot be captured, in the user's words."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import fx, nn

from autopar.errors import CaptureError, Where

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n?(?P<code>[^\n]*)')
_RAISED = re.compile(r"Developer debug context: raised exception (.+)|with fake tensors: .*: got (\w+\(.+\))")
_CALLED = re.compile(r"(?:trace (?:the )?builtin(?: operator)?|that the function) `(?:<unknown module>\.)?(?P<name>[\w.]+?)\.?`")
_REMEDIES = {
    "data-dependent": "the value of a tensor decides the control flow: use torch.where, or pass the choice as a Python value",
    "logging": "remove the log call from forward, or guard it with `if not torch.compiler.is_compiling()`",
    "Dynamic control flow": "the value of a tensor decides the control flow: use torch.where, or pass the choice as a Python value",
    "entirely functional graph": "make a tensor that forward changes in place a buffer: self.register_buffer(name, tensor) in __init__",
    "Tensor.backward() call": "compute in forward what it needs of gradients by torch.autograd.grad(..., create_graph=True), which returns "
    "them: `.backward()` writes into parameters",
    "requires_grad_() call": "let a tensor of forward's own require the gradient: `x = x.detach().requires_grad_()`; or take gradients by "
    "torch.func.grad",
    "autograd.grad consumed": "pass create_graph=True, or retain_graph=True, to torch.autograd.grad: backward goes through the graph again",
    "using `torch.autograd.grad`": "take the gradient by torch.func.grad",
    "item()": "do not read a tensor's value in forward (`.item()`, `int(x)`): compute it before and pass it as a Python value",
}
_OUTSIDE = (
    "compute the loss outside of the model: let forward return the log-probabilities, and go on with `loss = F.ctc_loss(pm(x), ...)` and "
    "`loss.backward()`"
)
_MISCOMPILED = ("multilabel_margin_loss",)
_SHAPES = (
    "keep shapes fixed: compute for all rows and multiply by a mask (`y + expert(x) * picked.unsqueeze(-1)`, torch.where(mask, x, 0)), "
    "or take a fixed number of rows (`scores.topk(capacity)` and `x[index]`)"
)
_DEFAULT_REMEDY = "the model must be one graph under torch.compile(fullgraph=True): try that to see the same refusal in torch's words"
_BEHIND_DYNAMO = "write the line otherwise: torch cannot run it on tensors that have shapes and no values; if the model runs, report it"


@functools.lru_cache(maxsize=4096)
def user_line(stack: str) -> str:
    """``file.py:12: code`` of the last frame in a printed stack that lies outside torch, or ``""``."""
    for match in reversed(list(_FRAME.finditer(stack))):
        if not match["file"].startswith((_TORCH, _HERE)) and not match["file"].startswith("<"):
            return f"{match['file']}:{match['line']}: {match['code'].strip()}"
    return ""


def is_torchs(file: str) -> bool:
    """Whether a source file is torch's own."""
    return file.startswith(_TORCH)


def as_capture_error(error: BaseException) -> CaptureError:
    """`error`, raised by torch while it captured, as a CaptureError with the user's line."""
    what = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()
    text = str(error)
    source = user_line("".join(_frames(error))) or user_line(text)
    kind = type(error).__name__  # torch's classes for these are private
    if "_ctc_loss" in text:
        said = "torch gives F.ctc_loss a result whose shape depends on the values of the lengths"
        return CaptureError(said, where=Where(source=source), remedy=_OUTSIDE)
    if kind == "DynamicOutputShapeException" or "dynamic shape operator" in text.lower():
        op = what if kind == "DynamicOutputShapeException" else ""
        said = "the shape of a result depends on the values of a tensor, and a program has fixed shapes"
        return CaptureError(said, where=Where(op=op, source=source), remedy=_SHAPES)
    if isinstance(error, AssertionError) and "backend_input" in traceback.format_tb(error.__traceback__)[-1]:  # Dynamo made no graph
        return CaptureError("forward computes nothing with tensors", remedy="pass the batch as tensors, and return what is computed of it")
    if called := _CALLED.search(text):
        return _cannot_call(called["name"], source)
    raised = _RAISED.search(text)
    what = f"{what}: {raised[1] or raised[2]}" if raised else what
    default = _DEFAULT_REMEDY if type(error).__module__.startswith("torch._dynamo") else _BEHIND_DYNAMO
    remedy = next((remedy for mark, remedy in _REMEDIES.items() if mark.lower() in text.lower()), default)
    if kind == "DataDependentOutputException":
        what = f"forward reads the value of a tensor ({what})"
        remedy = _REMEDIES["item()"]
    return CaptureError(f"the model cannot be captured as one graph: {what}", where=Where(source=source), remedy=remedy)


def _cannot_call(name: str, source: str) -> CaptureError:
    """The refusal of a call of what is neither torch's nor the model's own Python, by what Dynamo calls it."""
    if name.startswith(("Random.", "random.")):
        return draws_of_python(name.replace("Random.", "random.", 1), source)
    said = f"forward calls {name}, of which there is no graph"
    if name == "print":
        return CaptureError(said, where=Where(source=source), remedy=_REMEDIES["logging"])
    remedy = "call it outside of the model and pass in what it gives, or compute that by torch's functions"
    return CaptureError(said, where=Where(source=source), remedy=remedy)


def draws_of_python(name: str, source: str = "") -> CaptureError:
    """The refusal of numbers that Python's generator draws: in a graph they would be constants."""
    return CaptureError(
        f"forward draws of Python's generator ({name}), which a program does not do",
        where=Where(source=source),
        remedy="draw with torch.rand, randn, randint or bernoulli, which follow torch.manual_seed and are the same on every layout; or "
        "draw outside of the model, and pass the number in as a tensor",
    )


def _frames(error: BaseException) -> Iterable[str]:
    stack = getattr(error, "real_stack", None)  # Dynamo's own record of the user's frames
    return traceback.format_list(stack) if stack else traceback.format_tb(error.__traceback__)


def rebinding(warned: Iterable[str]) -> CaptureError | None:
    """The refusal where Dynamo warns that forward may bind a buffer or parameter to a new tensor.

    Changes in place are results of the graph; a new tensor under the old name is a side effect outside of it, and would be lost.
    """
    for message in warned:
        rebound = [source for source in re.findall(r'"([^"]+)"', message) if source.endswith(("._buffers", "._parameters"))]
        if "side effects" in message and rebound:
            path = re.sub(r"\._modules\['([^']+)'\]", r".\1", rebound[0]).partition("]")[2].rpartition(".")[0].lstrip(".")
            return CaptureError(
                "forward binds a buffer or a parameter to a new tensor, which a program cannot do",
                where=Where(module=path or "the model itself"),
                remedy="change it in place: `self.name.copy_(value)` instead of `self.name = value`; if it is made anew for other shapes "
                "alone, call the model once on a batch of these shapes before",
            )
    return None


def rebinds(model: nn.Module, run: Callable[[], object]) -> bool:
    """Whether `run` leaves another tensor under a parameter's or buffer's name: Dynamo warns of ``self.x = self.x.to(device)`` too.

    Afterwards every module is as before. True where it cannot be run.
    """
    before = [(module, dict(vars(module)), dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    try:
        run()
        return any(
            held.keys() != now.keys() or any(now[name] is not tensor for name, tensor in held.items())
            for module, _, *both in before
            for held, now in zip(both, (module._parameters, module._buffers), strict=True)
        )
    except Exception:  # whatever stops it, nothing is known then
        return True
    finally:
        for module, attributes, parameters, buffers in before:
            for held, now in ((attributes, vars(module)), (parameters, module._parameters), (buffers, module._buffers)):
                now.clear()
                now.update(held)


def refuse_unseen(model: nn.Module) -> None:
    """Raise CaptureError where the model does in training what no graph of it shows, and a program would leave out silently."""
    if type(model).__name__ == "OptimizedModule":  # a private class of torch's
        raise CaptureError("the model is what torch.compile made of one", remedy="pass the model itself: model._orig_mod")
    if isinstance(model, torch.jit.ScriptModule):
        raise _scripted("")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise CaptureError(
                f"parameter {name!r} has no shape yet",
                where=Where(module=name.rpartition(".")[0]),
                remedy="call the model once on a batch, which gives lazy modules their shapes",
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name!r} has gradient hooks, which a program does not run: gradients are made by its own backward",
                where=Where(module=name.rpartition(".")[0]),
                remedy="remove the hooks; register them on what compile returns, or change p.grad after backward",
            )


def _scripted(name: str) -> CaptureError:
    return CaptureError(
        "a module of TorchScript (torch.jit.script, trace or load), which has no forward that can be captured",
        where=Where(module=name),
        remedy="use the nn.Module that it was made of",
    )


def of_modules(model: nn.Module) -> Iterator[CaptureError]:
    """The same of single modules, where forward calls them: what is refused then, `where` with the module's path."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield _scripted(name)
        if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1 and module.training:
            yield CaptureError(
                f"the dropout of {type(module).__name__} between its layers is missing in the graph that torch makes of it",
                where=Where(module=name),
                remedy="let single layers follow each other with nn.Dropout between them, or set dropout=0.0",
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield CaptureError(
                f"max_norm={module.max_norm} of {type(module).__name__}: forward changes the table, a parameter, where it looks up",
                where=Where(module=name),
                remedy="leave max_norm out, and scale the table's rows after optimizer.step() or what was looked up in forward",
            )
        counts = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None
        if counts and module.momentum is None:
            yield CaptureError(
                f"momentum=None of {type(module).__name__}: how much a step counts depends on the number of steps so far, a tensor",
                where=Where(module=name),
                remedy="give it a momentum, such as 0.1",
            )


def changes_parameter(name: str, node: fx.Node) -> CaptureError:
    """The refusal where forward changes a parameter in place; `node` is what it becomes."""
    return CaptureError(
        f"forward changes the parameter {name!r} in place, which in a program only the optimizer does",
        where=Where(module=name.rpartition(".")[0], source=user_line(node.meta.get("stack_trace") or "")),
        remedy="change it between steps, under torch.no_grad() after optimizer.step(), or compute with what forward makes of it "
        "(`self.weight.clamp(...)`) and leave it as it is",
    )


def refuse_miscompiled(graph: fx.Graph) -> None:
    """Raise CaptureError at the first call that torch's own decomposition computes otherwise than the call itself."""
    for node in graph.nodes:
        if getattr(node.target, "__name__", "") in _MISCOMPILED:
            raise CaptureError(
                f"torch decomposes {node.target.__name__} into ops that compute another loss",
                where=Where(op=node.target.__name__, source=user_line(node.meta.get("stack_trace") or "")),
                remedy="write the loss out, or use multilabel_soft_margin_loss",
            )


def refuse_random(graph: fx.Graph) -> None:
    """Raise CaptureError at the first op that draws random numbers otherwise than by position (`autopar.random_ops`).

    Its numbers would depend on how the tensor is cut, and a distributed run would differ from the plain one silently.
    """
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and _draws(node):
            raise CaptureError(
                f"{node.target} draws random numbers, and has no counterpart that draws the same under every layout",
                where=Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"]),
                remedy="draw with torch.rand, randn, randint, bernoulli or dropout, whose numbers follow from the element's place",
            )


def refuse_float8(graph: fx.Graph) -> None:
    """Raise CaptureError at the first value in a floating dtype of 8 bits: torch promotes none of these, and no rule knows their sums."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize < 2:
            raise CaptureError(
                f"a tensor of {value.dtype}, which programs do not compute with",
                where=Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"]),
                remedy="compute in torch.bfloat16 or float16 instead",
            )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raise CaptureError at the first sparse value: programs compute with dense tensors, and gradients are parts of such."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                "a tensor that is sparse, as the gradient of an embedding with sparse=True is: programs compute with dense ones",
                where=Where(op=str(node.target), module=node.meta["module"], source=node.meta["source"]),
                remedy="pass sparse=False to the embedding, and an optimizer of dense gradients (AdamW in place of SparseAdam)",
            )


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    # Attention ops carry the tag for their dropout, which is an argument.
    names = [argument.name for argument in node.target._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    probability = node.kwargs.get("dropout_p", node.args[position] if len(node.args) > position else 0.0)
    return probability != 0.0


@contextlib.contextmanager
def quiet(model: nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """No warnings of torch's, and no traceback that it logs of what it raises, too; but where Dynamo warns of side effects, which no
    program has, those that would be missed are refused."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
    refusal = rebinding(str(warning.message) for warning in caught)
    if refusal is not None and rebinds(model, run):
        raise refusal
