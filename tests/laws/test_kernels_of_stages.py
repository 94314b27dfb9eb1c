"""The kernels of stages are among those that the bound over all cuts assumes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from overlapping import NORMING, overlapping
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.capture import Trace, capture
from autopar.constraints import Constraint, layout
from autopar.core.problem import Kernels
from autopar.cost.kernel_offers import in_any_stage
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.planner.pipeline.pipeline_bound import part_constraints
from autopar.planner.pipeline.unfold import Instances
from autopar.sharding import Forced, classes_of, resolve
from autopar.stages import cut_trace, seams, usable_points

MESH, PROFILE, NUM_LAYERS = autopar.Mesh(2), overlapping(kernels=NORMING), 4
CONSTRAINTS: dict[str, list[Constraint]] = {
    "all free": [],
    "one norm whole": [
        layout("model.layers.3.post_attention_layernorm", input="R")
    ],  # the norms after the products of all layers differ
}
Place = tuple[
    str, bool, str, str, str, bool
]  # product, whether recomputed, tensor, collective, layout, whether it normalizes


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Return the trace of a Llama whose products are all as large as their communicated tensors."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    sizes = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 32, "intermediate_size": 64, **heads}
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (2, 16))
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", **sizes, vocab_size=64, use_cache=False)
    )
    return capture(model, (), {"input_ids": ids, "labels": ids})


def places(trace: Trace, priced: Priced, kernels: Kernels) -> Iterator[tuple[Place, float]]:
    """Return the savings of each kernel by node and tensor of the trace."""
    keys = {n.name: n.meta.get("key", n.name) for n in trace.graph.nodes}
    for (v, _), offered in kernels.items():
        graph = priced.problem.values[priced.problem.variants[v].value].graph
        for kernel in offered:
            classes = priced.sources[kernel.product[0]].cluster
            assert classes is not None
            products = [cluster.members[0].key for cluster in classes.instances]
            for product, (name, _), hidden, s in itertools.product(
                products, priced.refs[v], kernel.hides, kernel.product[1]
            ):
                arc = graph.arcs[hidden.arc]
                moved = (
                    f"{arc.collective.kind}: {graph.layouts[arc.src]} to {graph.layouts[arc.dst]}"
                )
                lies = str(classes.strategies[s].members[0])
                yield (
                    (product, kernel.recomputed, keys[name], moved, lies, bool(kernel.also)),
                    hidden.saved_s,
                )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_bound_over_cuts_includes_every_kernel_of_a_stage(trace: Trace, name: str) -> None:
    points, placing = usable_points(trace)
    sewn = seams(trace, placing)
    resolved = resolve(trace, CONSTRAINTS[name], MESH)
    forced = part_constraints(resolved, sewn)
    whole = price(
        trace,
        classes_of(trace, MESH.shape, forced),
        MESH,
        PROFILE,
        budget_bytes=2**60,
        forced=forced,
        exposed=sewn.exposed,
    )
    again = {i.op for i in Instances(trace, whole, placing, forced).instances if i.recomputable}
    most: dict[tuple[object, ...], float] = {}
    for (*place, _), saved_s in places(trace, whole, in_any_stage(trace, whole, again)):
        most[*place] = max(saved_s, most.get((*place,), 0.0))
    seen = set[bool]()
    for position in [p.position for p in points]:
        for stage in cut_trace(trace, [position]).stages:
            for place, saved_s in kernels_of(stage, resolved):
                assert saved_s <= most.get(place[:-1], 0.0) * (1 + 1e-12), place
                seen.add(place[-1])
    assert seen == {False, True}


def kernels_of(stage: Trace, forced: Forced) -> list[tuple[Place, float]]:
    """Return the kernels that a stage may have."""
    priced = price(
        stage,
        classes_of(stage, MESH.shape, forced),
        MESH,
        PROFILE,
        budget_bytes=2**60,
        forced=forced,
    )
    return [*places(stage, priced, priced.problem.kernels)]
