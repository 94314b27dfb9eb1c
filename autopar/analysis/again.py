"""Which nodes of forward backward can have a use for running again."""

from __future__ import annotations

from torch import fx

from autopar.capture.trace import Trace


def asked_again(trace: Trace) -> frozenset[str]:
    """Names of the nodes of forward whose results backward reads, or others that it reads are made of.

    What leaves for another stage counts as read, so that in the whole model no node is in this set that is not in its stage's. What else
    only leaves, as a loss does, is not run again, though others of its op may be: it is left out, with what it alone reads.
    """
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    gradients = (*(p.gradient for p in trace.parameters), *(i.gradient for i in trace.inputs))
    read = {results[i].name for i in gradients if i is not None}  # type: ignore[index, union-attr]
    read |= {o.node for o in trace.outputs if o.crosses}
    found = set[str]()
    for node in reversed(trace.graph.nodes):
        if node.op == "call_function" and node.meta["phase"] == "forward":
            found |= {node.name} if node.name in read or any(_asks(user, found) for user in node.users) else set()
    return frozenset(found)


def _asks(user: fx.Node, found: set[str]) -> bool:
    return user.name in found or (user.op == "call_function" and user.meta["phase"] == "backward")
