"""Plans on disk, by a key that is known before anything is captured.

An entry has two lines of JSON and then the plan, as `Plan.dumps` wrote it: the format, and what was
read beside the key (`autopar.cache.manifest`) with the warnings of planning, which are given again
when the entry is used. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.cache import store
from autopar.cache.ambient import add_ambient
from autopar.cache.manifest import Manifest, make_manifest
from autopar.cache.walk import Opaque, Walk
from autopar.capture import Trace
from autopar.capture.hugging_face import install_recording_hooks
from autopar.core.json_text import read_json
from autopar.errors import PlanError
from autopar.plans import Plan

log = logging.getLogger("autopar")
_FORMAT, _VERSION = "autopar-cached-plan", 1
_Message = tuple[int, str]


@dataclass(frozen=True, slots=True)
class PlanKey:
    """The key of a plan, and what was hashed for it."""

    text: str
    walk: Walk

    @staticmethod
    def of(
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        request: tuple[Any, ...],
    ) -> PlanKey:
        """Return the key of a request.

        Args:
            model: the model.
            args, kwargs: the call; values of its tensors do not count.
            request: what else was asked for.

        Raises:
            Opaque: if the plan depends on something that cannot be hashed; says on what.
        """
        install_recording_hooks(model)  # as the capture will
        walk = Walk()
        walk.add("format", (_FORMAT, _VERSION))
        walk.add("the request", request)
        walk.add("the model", model)
        walk.add("the call", (args, dict(kwargs)), values=False)
        add_ambient(walk)
        return PlanKey(walk.hexdigest, walk)


def load_plan(key: PlanKey) -> Plan | None:
    """Return the cached plan of a key, and give its warnings again; None if there is none, or what
    it depends on has changed."""
    text = store.read_entry(key.text)
    if text is None:
        return None
    try:
        plan, manifest, messages = _read(text)
    except (ValueError, KeyError, TypeError, AttributeError, PlanError) as error:
        store.report_damaged(key.text, f"the entry {key.text} cannot be read: {error}")
        return None
    if reason := manifest.difference():
        log.debug("the cached plan %s is not used: %s", key.text, reason)
        return None
    for level, message in messages:
        log.log(level, "%s", message)
    return plan


def save_plan(
    key: PlanKey, plan: Plan, traces: Iterable[Trace], messages: Iterable[_Message]
) -> bool:
    """Cache a plan, unless it depends on something that cannot be compared; the log says on what.

    Args:
        key: of its request, made before it was planned.
        plan: the plan.
        traces: all captures that planning made.
        messages: the warnings of planning.

    Returns:
        Whether it was written.
    """
    try:
        manifest = make_manifest(traces, key.walk)
    except Opaque as reason:
        log.debug("the plan is not cached: %s", reason)
        return False
    head = {"format": _FORMAT, "version": _VERSION}
    body = {"manifest": manifest.to_json(), "messages": [list(each) for each in messages]}
    return store.write_entry(key.text, f"{json.dumps(head)}\n{json.dumps(body)}\n{plan.dumps()}")


def _read(text: str) -> tuple[Plan, Manifest, list[_Message]]:
    head, body, plan = text.split("\n", 2)
    if read_json(head) != {"format": _FORMAT, "version": _VERSION}:
        raise ValueError("it is no cached plan of this version")
    data = read_json(body)
    messages = [(int(level), str(message)) for level, message in data["messages"]]
    return Plan.loads(plan), Manifest.from_json(data["manifest"]), messages


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[_Message]]:
    """Record the warnings that autopar logs in this thread."""
    found: list[_Message] = []
    thread = threading.get_ident()

    def record(message: logging.LogRecord) -> bool:
        if message.thread == thread and message.levelno >= logging.WARNING:
            found.append((message.levelno, message.getMessage()))
        return True

    # not as a handler: without any handler Python itself prints warnings
    log.addFilter(record)
    try:
        yield found
    finally:
        log.removeFilter(record)
