"""Models that are fx.GraphModules themselves: of torch.fx.symbolic_trace, torch.export or torchvision's feature extractors.

What Dynamo captures of a module gets all that the module holds, also what the module is one by: its graph. So Dynamo is given a module with
the same forward, which is no GraphModule, and holds all but that.
"""

from __future__ import annotations

from torch import fx, nn

_OF_GRAPH_MODULES = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - frozenset(vars(nn.Module()))


def without_graph(model: nn.Module) -> nn.Module:
    """`model`, or of a GraphModule one that shares its parameters, buffers, modules and hooks."""
    if not isinstance(model, fx.GraphModule):
        return model
    kind = type(type(model).__name__, (nn.Module,), {"forward": type(model).forward})
    plain: nn.Module = kind()
    vars(plain).update({name: value for name, value in vars(model).items() if name not in _OF_GRAPH_MODULES})
    return plain
