"""autopar turns a single-device PyTorch model into a distributed one.

    pm = autopar.compile(model, mesh, example_inputs=batch)

plans, emits a distributed graph, and shards the parameters. Planning prices every legal layout of
every op, and chooses layouts, ZeRO sharding and recomputation in one optimization with a proven
bound. It needs no GPU and no process group:

>>> import torch, autopar
>>> from torch import nn
>>> class Net(nn.Module):
...     def __init__(self) -> None:
...         super().__init__()
...         self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)
...     def forward(self, x: torch.Tensor) -> torch.Tensor:
...         return (x + self.down(torch.relu(self.up(x)))).pow(2).mean()
>>> batch = {"x": torch.randn(64, 512)}

A plan states the layout of every tensor on a mesh. ``S(0) R`` splits dim 0 over the first axis and
replicates the tensor over the second:

>>> mesh = autopar.Mesh({"node": 2, "gpu": 2})
>>> plan = autopar.plan(Net(), mesh, example_inputs=batch, hardware="cpu-gloo")
>>> plan.prediction.step_s > 0 and plan.proof.bound_s <= plan.proof.objective_s
True
>>> print(autopar.explain(plan))  # doctest: +ELLIPSIS
Net on mesh node=2,gpu=2 (4 devices), cpu-gloo, optimizer adamw
...

`check` verifies the claims of a plan without the solver: legality, every collective, memory, time,
and the bound, the last by arithmetic alone:

>>> autopar.check(plan, Net(), batch).ok
True

`verify` runs all ranks of the emitted program in one process, and compares the outputs and every
gradient with the plain model:

>>> autopar.verify(plan, Net(), batch).ok
True
"""

from typing import TYPE_CHECKING

from autopar.core.lazy import lazily
from autopar.version import VERSION as __version__

if TYPE_CHECKING:
    from autopar import constraints, rules
    from autopar.api.compiling import compile
    from autopar.api.planning import check, plan, verify
    from autopar.api.what_if import flips, what_if
    from autopar.checkpoint.manager import Checkpoints
    from autopar.checkpoint.weights import load_weights, save_weights, weights_on_meta
    from autopar.core.hardware import HardwareProfile
    from autopar.core.layout import Layout
    from autopar.core.mesh import Mesh
    from autopar.errors import AutoparError
    from autopar.explanation.difference import diff
    from autopar.explanation.explain import explain
    from autopar.integrations.accelerator import Accelerator as Accelerator
    from autopar.integrations.lightning_strategy import LightningStrategy as LightningStrategy
    from autopar.integrations.pretrained import load_adapter, save_pretrained
    from autopar.integrations.trainer import Trainer as Trainer
    from autopar.plans import Plan
else:
    # The same names, imported when they are first used. `autopar.integrations` raises an error with
    # a remedy if transformers, accelerate or Lightning is missing. `autopar.report.card` adds to
    # `Plan` what notebooks show.
    __getattr__, __dir__ = lazily(
        "autopar",
        {
            "Accelerator": "autopar.integrations",
            "AutoparError": "autopar.errors",
            "Checkpoints": "autopar.checkpoint.manager",
            "HardwareProfile": "autopar.core.hardware",
            "Layout": "autopar.core.layout",
            "LightningStrategy": "autopar.integrations",
            "Mesh": "autopar.core.mesh",
            "Plan": "autopar.report.card",
            "Trainer": "autopar.integrations",
            "check": "autopar.api.planning",
            "compile": "autopar.api.compiling",
            "diff": "autopar.explanation.difference",
            "explain": "autopar.explanation.explain",
            "flips": "autopar.api.what_if",
            "load_adapter": "autopar.integrations.pretrained",
            "load_weights": "autopar.checkpoint.weights",
            "plan": "autopar.api.planning",
            "save_pretrained": "autopar.integrations.pretrained",
            "save_weights": "autopar.checkpoint.weights",
            "verify": "autopar.api.planning",
            "weights_on_meta": "autopar.checkpoint.weights",
            "what_if": "autopar.api.what_if",
        },
    )

__all__ = [
    "AutoparError",
    "Checkpoints",
    "HardwareProfile",
    "Layout",
    "Mesh",
    "Plan",
    "__version__",
    "check",
    "compile",
    "constraints",
    "diff",
    "explain",
    "flips",
    "load_adapter",
    "load_weights",
    "plan",
    "rules",
    "save_pretrained",
    "save_weights",
    "verify",
    "weights_on_meta",
    "what_if",
]
