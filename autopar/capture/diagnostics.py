"""Explain in the user's words why a model cannot be captured."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch import fx, nn

from autopar.capture.tensor_kinds import refusal_in_words
from autopar.errors import CaptureError, Where

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n?(?P<code>[^\n]*)')
_RAISED = re.compile(
    r"Developer debug context: raised exception (.+)|with fake tensors: .*: got (\w+\(.+\))"
)
_CALLED = re.compile(
    r"(?:trace (?:the )?builtin(?: operator)?|that the function) `(?:<unknown"
    r" module>\.)?(?P<name>[\w.]+?)\.?`"
)
_NUMPY = re.compile(
    r"numpy function: <(?:bound method RandomState\.(\w+)|cyfunction (default_rng|\w*Generator\w*))"
)
_RESHAPED = re.compile(
    r"calling `L\['(?P<input>\w+)'\][^`]*\.(?P<method>\w+)`\. Reason: Getting an inplace view on a"
    r" graph input"
)
_READS = (
    "do not read the value of a tensor in forward (`.item()`, `int(x)`); compute with the tensor"
    " instead. If the value decides a shape or a branch, compute it before the call and pass it as"
    " a Python value, such as a list; forward may read tensors that it creates from plain numbers"
    " (`torch.tensor(sizes)`)"
)
_REMEDIES = {
    "data-dependent": (
        "the value of a tensor decides the control flow: use torch.where, or pass the choice as a"
        " Python value"
    ),
    "logging": (
        "remove the log call from forward, or guard it with `if not torch.compiler.is_compiling()`"
    ),
    "Dynamic control flow": (
        "the value of a tensor decides the control flow: use torch.where, or pass the choice as a"
        " Python value"
    ),
    "entirely functional graph": (
        "register the tensor that forward changes in place as a buffer:"
        " self.register_buffer(name, tensor) in __init__"
    ),
    "Tensor.backward() call": (
        "compute the gradients that forward needs with torch.autograd.grad(...,"
        " create_graph=True), which returns them; `.backward()` writes into parameters"
    ),
    "requires_grad_() call": (
        "call requires_grad_() on a tensor that forward creates: `x ="
        " x.detach().requires_grad_()`; or compute gradients with torch.func.grad"
    ),
    "autograd.grad consumed": (
        "pass create_graph=True or retain_graph=True to torch.autograd.grad: backward uses the"
        " graph again"
    ),
    "using `torch.autograd.grad`": "compute the gradient with torch.func.grad",
    "opaque object was created": (
        "do not create a torch.Generator in forward: torch.rand and similar functions follow"
        " torch.manual_seed and give the same numbers under every layout"
    ),
    "Data dependent operator": (
        "the op reads the values of its operands, as torch.cov does with weights: compute the"
        " result with ops that do not. For the covariance of the rows of `x` with fweights `w`:"
        " `w = w.to(x)`, `n = w.sum()`, `c = x - (x * w).sum(1, keepdim=True) / n`,"
        " `(c * w) @ c.T / (n - 1)`"
    ),
    "item()": _READS,
    "Tensor.tolist()": _READS,
}
_CTC = (
    "call F.ctc_loss by its name in torch.nn.functional, or nn.CTCLoss, with one padded row of"
    " targets per sample"
)
_FLEX = re.compile(
    r'nn[/\\]attention[/\\]flex_attention\.py", line \d+, in (create_block_mask|flex_attention)\b'
)
_DENSE = (
    'pass attn_implementation="sdpa" to a transformers model; in other models, call'
    " F.scaled_dot_product_attention with the mask as attn_mask, which can also be a bias that is"
    " added to the scores"
)
_USER_CODE = "\nfrom user code:\n"  # Dynamo quotes the user's code after this line
_UNKNOWN = re.compile(
    r"Could not (guard on|extract specialized integer from) data-dependent expression"
)
_ON_VALUES = frozenset(
    _REMEDIES[mark] for mark in ("data-dependent", "Dynamic control flow", "item()")
)
_OUTSIDE = (
    "call it outside the model and pass its result as an argument, or use torch functions instead"
)
_NO_VIEWS = ("resize", "resize_as", "set")
_PADDED = (
    "run the recurrent layer on the padded batch: `out, _ = rnn(x)`. Padding at the end does not"
    " change earlier outputs, except those of the backward direction. Multiply `out` by a mask, and"
    " read the last state of each sample with `out.gather`"
)
_INSTEAD = {
    "pack_padded_sequence": _PADDED,
    "pack_sequence": _PADDED,
    "print": _REMEDIES["logging"],
}
_SHAPES = (
    "keep shapes fixed: compute all rows and multiply by a mask (`y + expert(x) *"
    " picked.unsqueeze(-1)`, torch.where(mask, x, 0)), or select a fixed number of rows"
    " (`scores.topk(capacity)` and `x[index]`)"
)
_COUNTS = (
    "count into a tensor of a fixed size: `torch.zeros(size, dtype=torch.long,"
    " device=i.device).scatter_add(0, i, torch.ones_like(i))`; with weights,"
    " `weights.new_zeros(size).scatter_add(0, i, weights)`"
)
_DEFAULT_REMEDY = (
    "the model must be one graph under torch.compile(fullgraph=True); call that to see torch's own"
    " error message"
)
_BEHIND_DYNAMO = (
    "rewrite the line: torch cannot run it on fake tensors, which have shapes but no values; if the"
    " plain model runs, report it"
)


@functools.lru_cache(maxsize=4096)
def user_line(stack: str) -> str:
    """Return ``file.py:12: code`` of the last frame outside torch and autopar in a printed stack,
    or ``""``."""
    for match in reversed(list(_FRAME.finditer(stack))):
        if not match["file"].startswith((_TORCH, _HERE)) and not match["file"].startswith("<"):
            return f"{match['file']}:{match['line']}: {match['code'].strip()}"
    return ""


def is_torchs(file: str) -> bool:
    """Return whether a source file belongs to torch."""
    return file.startswith(_TORCH)


def as_capture_error(error: BaseException) -> CaptureError:
    """Convert an error that torch raised during a capture to a CaptureError with the user's
    line."""
    lines = (line for line in str(error).splitlines() if line.strip())
    message = next(lines, type(error).__name__).strip()
    frames = "".join(_frames(error))
    source = user_line(frames) or user_line(str(error))
    text = str(error).partition(_USER_CODE)[0]  # without quoted code, which may match by chance
    return (
        _of_known_function(message, frames, text, source)
        or _of_result(error, message, text, source)
        or _of_pattern(text, source)
        or _of_graph(error, message, text, source)
    )


def _of_known_function(what: str, frames: str, text: str, source: str) -> CaptureError | None:
    """Return the error for a function or a kind of tensor that has a specific remedy; None for
    other errors.

    Args:
        what: the first line of torch's message.
        frames: the printed stack.
        text: torch's message without quoted code.
        source: the user's line.
    """
    if flex := _FLEX.search(frames):
        problem = f"cannot be captured by torch: {what}"
        line = user_line(frames[: flex.start()])
        return of_flex_attention(problem, line, _marked_remedy(text), op=flex[1])
    if refused := refusal_in_words(text, source):
        return refused
    if "_ctc_loss" not in text:
        return None
    problem = "the shape of the result of torch.ctc_loss depends on the values of the lengths"
    return CaptureError(problem, where=Where(source=source), remedy=_CTC)


def _of_result(error: BaseException, what: str, text: str, source: str) -> CaptureError | None:
    """Return the error for a result whose shape depends on values, or for a forward that computes
    nothing; None for other errors."""
    has_no_shape = type(error).__name__ == "DynamicOutputShapeException"  # private in torch
    if has_no_shape or "dynamic shape operator" in text.lower():
        return of_changing_shapes(Where(op=what if has_no_shape else "", source=source))
    if not isinstance(error, AssertionError):
        return None
    if "backend_input" not in traceback.format_tb(error.__traceback__)[-1]:
        return None
    return CaptureError(  # Dynamo created no graph
        "forward performs no tensor computation",
        remedy="pass the batch as tensors, and return results that are computed from it",
    )


def _of_pattern(text: str, source: str) -> CaptureError | None:
    """Return the error for a call that torch's message names; None if it names none."""
    if drawn := _NUMPY.search(text):
        return draws_of_numpy(drawn[1] or drawn[2], source)
    if reshaped := _RESHAPED.search(text):
        return _reshapes(reshaped["input"], reshaped["method"], source)
    if called := _CALLED.search(text):
        return _cannot_call(called["name"], source)
    return None


def _of_graph(error: BaseException, what: str, text: str, source: str) -> CaptureError:
    """Return the error for a model that is not one graph, with torch's reason."""
    if raised := _RAISED.search(text):
        what = f"{what}: {raised[1] or raised[2]}"
    is_dynamos = type(error).__module__.startswith("torch._dynamo")
    remedy = _marked_remedy(text) or (_DEFAULT_REMEDY if is_dynamos else _BEHIND_DYNAMO)
    if unknown := _UNKNOWN.search(what):
        is_branch = unknown[1].startswith("guard")
        decided = "a branch" if is_branch else "a size or another number that must be known"
        what = f"{decided} depends on the values of tensors"
        remedy = remedy if is_branch else _READS
    if type(error).__name__ == "DataDependentOutputException":  # private in torch
        return reads_a_value(Where(op=what, source=source))
    return CaptureError(
        f"the model cannot be captured as one graph: {what}",
        where=Where(source=source),
        remedy=remedy,
    )


def _marked_remedy(text: str) -> str:
    """Return the remedy of the first known phrase in a message of torch, or ``""``."""
    return next((remedy for mark, remedy in _REMEDIES.items() if mark.lower() in text.lower()), "")


def reads_a_value(where: Where) -> CaptureError:
    """Return the error for a number that is read from a tensor and then decides a shape or another
    part of the graph."""
    message = "the model cannot be captured as one graph: forward reads the value of a tensor"
    return CaptureError(message, where=where, remedy=_READS)


def of_inputs(refusal: CaptureError, names: Collection[str]) -> CaptureError:
    """Add the inputs that determine the values to a refusal about values; return any other refusal
    unchanged."""
    shown = " and ".join(map(repr, names))
    if names and refusal.remedy == _DEFAULT_REMEDY:
        message = (
            f"{refusal.what}; before this, forward reads a value that depends only on the values of"
            f" {shown}"
        )
        remedy = (
            "if these values are the cause, pass the value that forward computes from"
            f" {shown} as an argument; otherwise, {_DEFAULT_REMEDY}"
        )
        return CaptureError(message, where=refusal.where, remedy=remedy)
    if refusal.remedy not in _ON_VALUES or not names:
        return refusal
    message = f"{refusal.what}; it depends only on the values of {shown}"
    remedy = (
        f"{refusal.remedy}; or pass the value that forward computes from {shown} as an argument"
    )
    return CaptureError(message, where=refusal.where, remedy=remedy)


class ReadsInputs(CaptureError):
    """Forward reads values of inputs and buffers that the capture may treat as known.

    Attributes:
        keys: flat positions of the inputs and names of the buffers.
    """

    def __init__(self, refusal: CaptureError, keys: frozenset[int | str]) -> None:
        super().__init__(refusal.what, where=refusal.where, remedy=refusal.remedy)
        self.keys = keys


def of_flex_attention(
    why: str, source: str, remedy: str = "", *, op: str = "flex_attention"
) -> CaptureError:
    """Return the error for a call of torch.nn.attention.flex_attention.

    Args:
        why: the rest of the sentence after "a call of …".
        source: the user's line.
        remedy: what to do; a dense mask is suggested in any case.
        op: the function that was called.
    """
    message = f"a call of torch.nn.attention.flex_attention {why}"
    return CaptureError(
        message,
        where=Where(op=op, source=source),
        remedy=f"{remedy}; or {_DENSE}" if remedy else _DENSE,
    )


def of_changing_shapes(where: Where) -> CaptureError:
    """Return the error for an op whose result has a shape that depends on values."""
    problem = (
        "the shape of a result depends on the values of a tensor, but a program has fixed shapes"
    )
    remedy = _COUNTS if "bincount" in where.op else _SHAPES
    return CaptureError(problem, where=where, remedy=remedy)


def _cannot_call(name: str, source: str) -> CaptureError:
    """Return the error for a call that Dynamo cannot trace, such as a call of native code outside
    torch."""
    if name.startswith(("Random.", "random.")):
        return draws_of_python(name.replace("Random.", "random.", 1), source)
    problem = f"forward calls {name}, which torch cannot trace"
    return CaptureError(problem, where=Where(source=source), remedy=_INSTEAD.get(name, _OUTSIDE))


def _reshapes(name: str, method: str, source: str) -> CaptureError:
    """Return the error for a view that replaces the caller's tensor in place."""
    problem = (
        f"forward changes the shape of its input {name!r} in place ({name}.{method}()); a program"
        " does not change the caller's tensor"
    )
    view = method.removesuffix("_")
    replacement = f"create the view as a new tensor: `{name} = {name}.{view}(...)`"
    remedy = (
        f"compute a new tensor of that shape and assign it to a name: `{name} = ...`"
        if view in _NO_VIEWS
        else replacement
    )
    return CaptureError(problem, where=Where(source=source), remedy=remedy)


def draws_of_python(name: str, source: str = "") -> CaptureError:
    """Return the error for random numbers from Python's generator, which would be constants in a
    graph."""
    return _draws_elsewhere(f"Python's generator ({name})", source)


def draws_of_numpy(name: str, source: str) -> CaptureError:
    """Return the error for random numbers from numpy's generator, which Dynamo would replace with
    numbers from torch's generator."""
    return _draws_elsewhere(f"numpy's generator (numpy.random.{name})", source)


def _draws_elsewhere(generator: str, source: str) -> CaptureError:
    return CaptureError(
        f"forward draws random numbers from {generator}, which a program cannot do",
        where=Where(source=source),
        remedy=(
            "draw with torch.rand, randn, randint or bernoulli, which follow torch.manual_seed and"
            " give the same numbers under every layout; or draw outside the model and pass the"
            " numbers as a tensor"
        ),
    )


def _frames(error: BaseException) -> Iterable[str]:
    stack = getattr(error, "real_stack", None)  # Dynamo's record of the user's frames
    return traceback.format_list(stack) if stack else traceback.format_tb(error.__traceback__)


def rebinding_error(warned: Iterable[str]) -> CaptureError | None:
    """Return the error if Dynamo warns that forward may assign a new tensor to a buffer or
    parameter, else None.

    In-place changes are results of the graph. A new tensor under the old name is a side effect
    outside the graph, and would be lost.
    """
    for message in warned:
        rebound = [
            source
            for source in re.findall(r'"([^"]+)"', message)
            if source.endswith(("._buffers", "._parameters"))
        ]
        if "side effects" in message and rebound:
            path = (
                re.sub(r"\._modules\['([^']+)'\]", r".\1", rebound[0])
                .partition("]")[2]
                .rpartition(".")[0]
                .lstrip(".")
            )
            return CaptureError(
                "forward assigns a new tensor to a buffer or parameter, which a program cannot do",
                where=Where(module=path or "the model itself"),
                remedy=(
                    "change it in place: `self.name.copy_(value)` instead of `self.name = value`;"
                    " if forward replaces it only when shapes change, first call the model once on"
                    " a batch of these shapes"
                ),
            )
    return None


def rebinds(model: nn.Module, run: Callable[[], object]) -> bool:
    """Return whether `run` leaves another tensor under the name of a parameter or buffer.

    This check is needed because Dynamo also warns about ``self.x = self.x.to(device)``. All modules
    are restored afterwards. The result is True if `run` fails.
    """
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        run()
        return any(
            held.keys() != now.keys()
            or any(now[name] is not tensor for name, tensor in held.items())
            for module, _, *both in before
            for held, now in zip(both, (module._parameters, module._buffers), strict=True)
        )
    except Exception:  # models may raise anything; the answer is unknown then
        return True
    finally:
        for module, attributes, parameters, buffers in before:
            for state, now in (
                (attributes, vars(module)),
                (parameters, module._parameters),
                (buffers, module._buffers),
            ):
                now.clear()
                now.update(state)


def refuse_unseen(model: nn.Module) -> None:
    """Raise CaptureError if training the model has effects that a captured graph does not contain
    and that a program would omit silently."""
    if type(model).__name__ == "OptimizedModule":  # a private class of torch
        raise CaptureError(
            "the model is the result of torch.compile",
            remedy="pass the original model: model._orig_mod",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise _scripted_error("")
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise CaptureError(
                f"parameter {name!r} has no shape yet",
                where=Where(module=name.rpartition(".")[0]),
                remedy="call the model once on a batch to initialize its lazy modules",
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise CaptureError(
                f"parameter {name!r} has gradient hooks, which a program does not run: it computes"
                " gradients in its own backward graph",
                where=Where(module=name.rpartition(".")[0]),
                remedy=(
                    "remove the hooks; register them on the parameters of the compiled module, or"
                    " change p.grad after backward"
                ),
            )


def _scripted_error(name: str) -> CaptureError:
    return CaptureError(
        "a TorchScript module (torch.jit.script, trace or load) has no forward that can be"
        " captured",
        where=Where(module=name),
        remedy="use the nn.Module from which it was created",
    )


def of_modules(model: nn.Module) -> Iterator[CaptureError]:
    """Yield the error for each module that cannot be captured; `where` holds the module's path.

    An error applies only if forward calls the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield _scripted_error(name)
        if isinstance(module, nn.RNNBase) and _drops_between_layers(module):
            yield CaptureError(
                f"the dropout between the layers of {type(module).__name__} is missing in the graph"
                " that torch captures",
                where=Where(module=name),
                remedy=(
                    "use a sequence of single-layer modules with nn.Dropout between them, or set"
                    " dropout=0.0"
                ),
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield CaptureError(
                f"max_norm={module.max_norm} of {type(module).__name__}: forward changes the"
                " weight, a parameter, at each lookup",
                where=Where(module=name),
                remedy=(
                    "omit max_norm, and scale the rows of the weight after optimizer.step() or the"
                    " result of the lookup in forward"
                ),
            )
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and _averages_by_step(module):
            yield CaptureError(
                f"momentum=None of {type(module).__name__}: the weight of each step depends on the"
                " number of previous steps, which is a tensor",
                where=Where(module=name),
                remedy="set a momentum, such as 0.1",
            )


def _drops_between_layers(module: nn.RNNBase) -> bool:
    return bool(module.training and module.dropout and module.num_layers > 1)


def _averages_by_step(module: nn.modules.batchnorm._BatchNorm) -> bool:
    """Return whether running statistics weight a step by the number of previous steps."""
    return module.training and module.running_mean is not None and module.momentum is None


def changes_parameter(name: str, node: fx.Node) -> CaptureError:
    """Return the error for a parameter that forward changes in place; `node` is its new value."""
    return CaptureError(
        f"forward changes the parameter {name!r} in place; in a program, only the optimizer changes"
        " parameters",
        where=Where(
            module=name.rpartition(".")[0], source=user_line(node.meta.get("stack_trace") or "")
        ),
        remedy=(
            "change it between steps, under torch.no_grad() after optimizer.step(); or compute with"
            " a new tensor in forward (`self.weight.clamp(...)`) and leave the parameter unchanged"
        ),
    )


@contextlib.contextmanager
def quiet(model: nn.Module, run: Callable[[], object]) -> Iterator[None]:
    """Suppress warnings of torch and the tracebacks that it logs for errors that it also raises.

    Raises:
        CaptureError: Dynamo warned about a side effect that a program would lose, and `run` shows
            that forward has it.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
    refusal = rebinding_error(str(warning.message) for warning in caught)
    if refusal is not None and rebinds(model, run):
        raise refusal
