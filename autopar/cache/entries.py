"""Cache of plans and captures on disk. The key of an entry is known before the model is captured.

An entry consists of two lines of JSON and a body. The first line describes the entry. The second
line contains the manifest (`autopar.cache.manifest`), and the warnings that were logged when the
body was created; they are logged again when the entry is used. The body is the plan, as written by
`Plan.dumps`, or the trace as JSON. No pickles are used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as hooks

from autopar.cache import store
from autopar.cache.manifest import Manifest, make_manifest
from autopar.cache.origin import changed_package, origin_of_file, source_digest
from autopar.cache.trace_json import trace_from_json, trace_to_json
from autopar.cache.walk import Opaque, Walk
from autopar.capture import Trace
from autopar.capture.dynamo.preparing import changed_settings
from autopar.capture.hugging_face import install_recording_hooks
from autopar.core.garbage import collected_seldom
from autopar.core.json_text import read_json
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.rules.table import REGISTERED
from autopar.version import VERSION

# --------------------------------------------------------------------------------------------------
# The dependencies of a plan other than the request: versions, settings of torch, autopar's code.

_LIBRARIES = ("highspy", "numpy", "transformers")
_DEVICES = ("cpu", "cuda")
_PATCHED = (torch, functional, torch.Tensor, torch.nn.Module, torch.autograd)
_NOT_READ = ("AUTOPAR_CACHE", "AUTOPAR_CACHE_DIR", "AUTOPAR_KERNEL_CACHE")


def add_ambient(walk: Walk) -> None:
    """Hash the dependencies of a plan other than the request.

    Raises:
        Opaque: if a dependency cannot be hashed.
    """
    if changed_package():
        raise Opaque("the code of autopar was modified after this process started")
    for name, held in vars(hooks).items():
        if name.startswith("_global_") and name.endswith("hooks") and held:
            raise Opaque("hooks for all modules are registered")
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        raise Opaque("a torch function mode is active")
    walk.add("versions", tuple(_versions()))
    walk.add("settings of torch", tuple(_settings()))
    walk.add("settings of captures", changed_settings())
    walk.add("environment", tuple(_environment()))
    rules = ((op, repr(rule.row), rule.flops, rule.kind) for op, rule in REGISTERED.items())
    walk.add("rules", tuple(rules))
    walk.add("changes of torch", tuple(_patches()))


def _versions() -> Iterator[str]:
    yield from (VERSION, source_digest(), platform.python_version(), platform.machine())
    yield from (str(torch.__version__), str(torch.version.git_version))
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"no {name}"
    yield f"transformers {'is' if 'transformers' in sys.modules else 'is not'} loaded"


def _settings() -> Iterator[Any]:
    yield str(torch.get_default_dtype())
    yield str(torch.get_default_device())
    yield torch.are_deterministic_algorithms_enabled()
    yield (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    for kind in _DEVICES:
        yield (torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind)))
    yield torch.is_autocast_cache_enabled()
    cuda = torch.backends.cuda
    yield (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    yield (torch.cuda.is_available(), torch.backends.mha.get_fastpath_enabled())


def _environment() -> Iterator[tuple[str, str]]:
    # entries contain the warnings of captures, which only rank 0 logs
    yield "rank", "0" if os.environ.get("RANK", "0") == "0" else "another"
    for name, value in sorted(os.environ.items()):
        if name.startswith("AUTOPAR_") and name not in _NOT_READ:
            yield name, value


def _patches() -> Iterator[tuple[str, Any]]:
    """Yield the functions of torch that the user replaced."""
    for space in _PATCHED:
        for name, item in sorted(vars(space).items()):
            code = getattr(item, "__code__", None)
            if isinstance(code, types.CodeType) and origin_of_file(code.co_filename) == "user":
                yield f"{space.__name__}.{name}", item


# --------------------------------------------------------------------------------------------------
# Entries.

T = TypeVar("T")
log = logging.getLogger("autopar")
_FORMAT, _VERSION = "autopar-cached", 1
_Message = tuple[int, str]
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ImportError, PlanError)


@dataclass(frozen=True, slots=True)
class Key:
    """The key of an entry, and the walk that hashed it.

    Attributes:
        kind: the kind of the entry.
        text: the key, as hexadecimal digits.
        walk: the walk that computed the key.
    """

    kind: Literal["plan", "capture"]
    text: str
    walk: Walk

    @staticmethod
    def of(
        kind: Literal["plan", "capture"],
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        request: tuple[Any, ...],
    ) -> Key:
        """Return the key of a plan or capture.

        Args:
            kind: the kind of the entry.
            model: the model.
            args, kwargs: the arguments of the call. The values of tensors are not hashed.
            request: the options of the request.

        Raises:
            Opaque: if a dependency of the result cannot be hashed. The message names it.
        """
        install_recording_hooks(model)  # the capture also installs these hooks
        walk = Walk()
        walk.add("format", (_FORMAT, _VERSION, kind))
        walk.add("the request", request)
        walk.add("the model", model)
        walk.add("the call", (args, dict(kwargs)), values=False)
        add_ambient(walk)
        return Key(kind, walk.hexdigest, walk)


def load_plan(key: Key) -> Plan | None:
    """Return the cached plan of a key, and log its warnings again. Return None if there is no plan,
    or a dependency has changed."""
    return _load(key, Plan.loads)


def save_plan(key: Key, plan: Plan, traces: Iterable[Trace], messages: Iterable[_Message]) -> None:
    """Cache a plan, unless a dependency cannot be compared. In that case, the dependency is logged.

    Args:
        key: the key of the request, computed before planning.
        plan: the plan.
        traces: all captures that were used for planning.
        messages: the warnings of planning.
    """
    mark = plan.fingerprint
    axes = ", ".join(f"{axis.name}={axis.size}" for axis in plan.mesh.axes)
    about = f"{mark.model_name or 'model'} on {axes} of {mark.profile}"
    _save(key, about, plan.dumps, traces, messages)


def load_trace(key: Key, model: nn.Module) -> Trace | None:
    """Return the cached capture of a key, and log its warnings again. Return None if there is no
    capture, or a dependency has changed.

    Args:
        key: the key.
        model: the model of the key.
    """
    with collected_seldom():
        return _load(key, lambda text: trace_from_json(json.loads(text), model, key.walk.followed))


def save_trace(key: Key, model_name: str, trace: Trace, messages: Iterable[_Message]) -> None:
    """Cache a capture, unless a dependency cannot be compared or a part cannot be written as JSON.
    In that case, the reason is logged.

    Args:
        key: the key of the capture, computed before it.
        model_name: the name of the model's class.
        trace: the capture.
        messages: the warnings of capturing.
    """
    shapes = ", ".join(
        shape if path.isdigit() else f"{path} {shape}" for path, shape in trace.batch_in_words
    )
    _save(
        key,
        f"{model_name}, {shapes}",
        lambda: json.dumps(trace_to_json(trace, key.walk.followed)),
        (trace,),
        messages,
    )


def _load(key: Key, read: Callable[[str], T]) -> T | None:
    text = store.read_entry(key.text)
    if text is None:
        return None
    try:
        head, lines, body = text.split("\n", 2)
        data = read_json(head)
        if (data["format"], data["version"], data["kind"]) != (_FORMAT, _VERSION, key.kind):
            raise ValueError(f"it is not a cached {key.kind} of this version")
        data = read_json(lines)
        manifest = Manifest.from_json(data["manifest"])
        messages = [(int(level), str(message)) for level, message in data["messages"]]
        reason = manifest.difference()
        found = None if reason else read(body)
    except _MALFORMED as error:
        store.report_damaged(key.text, f"cannot read the entry {key.text}: {error}")
        return None
    except Opaque as error:
        reason, found = str(error), None
    if reason:
        log.debug("the cached %s %s is not used: %s", key.kind, key.text, reason)
        return None
    for level, message in messages:
        log.log(level, "%s", message)
    return found


def _save(
    key: Key,
    about: str,
    body: Callable[[], str],
    traces: Iterable[Trace],
    messages: Iterable[_Message],
) -> None:
    try:
        manifest = make_manifest(traces, key.walk)
        text = body()
    except Opaque as reason:
        log.debug("the %s is not cached: %s", key.kind, reason)
        return
    head = {"format": _FORMAT, "version": _VERSION, "kind": key.kind, "about": about}
    details = {"manifest": manifest.to_json(), "messages": [list(each) for each in messages]}
    store.write_entry(key.text, f"{json.dumps(head)}\n{json.dumps(details)}\n{text}")


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[_Message]]:
    """Record the warnings that autopar logs in this thread."""
    found: list[_Message] = []
    thread = threading.get_ident()

    def record(message: logging.LogRecord) -> bool:
        if message.thread == thread and message.levelno >= logging.WARNING:
            found.append((message.levelno, message.getMessage()))
        return True

    # a filter, not a handler: with a handler, Python would no longer print warnings by default
    log.addFilter(record)
    try:
        yield found
    finally:
        log.removeFilter(record)
