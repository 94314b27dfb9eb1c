"""The formulas of the certificate and of the planner are two implementations of one model of time.
They agree on all profiles, for all kinds of collectives, buckets and ops."""

from __future__ import annotations

import itertools

import pytest
import torch
from planted_subjects import SUBJECTS

from autopar.analysis.work import computes_in, works
from autopar.certificate.intra_op import _IN_PASSES, count_work, is_free, product_dtype
from autopar.certificate.rates import Rates, handed_on_s, sent_s, wire_between
from autopar.core.collective import (
    BUCKETED,
    HOST_KINDS,
    KINDS,
    Collective,
    bucket_time,
    collective_time,
    most_put_in,
    share_of_bucket,
)
from autopar.core.hardware import HardwareProfile, slowest_of
from autopar.core.mesh import Mesh
from autopar.cost.op_times import compute_time
from autopar.cost.priced import output_broadcast_s, wire
from autopar.rules import call_of

PROFILES = {name: HardwareProfile.load(name) for name in HardwareProfile.names()}
PROFILES["unequal"] = slowest_of((PROFILES["h100-sxm"], PROFILES["a100-sxm-80gb"]))
MESHES = (
    Mesh({"a": 3, "b": 2}),
    Mesh({"node": 2, "gpu": 8}),
    Mesh(16),
    Mesh({"a": 2, "b": 4}, devices_per_node=2, links={"a": "intra"}),
)
BYTES = (4, 1000, 2**16, 3 * 2**20, 2**30)


def collectives(axis: int) -> list[Collective]:
    found = []
    for kind, size, dim in itertools.product(KINDS, BYTES, (0, 1)):
        to_dim = 1 - dim if kind == "all_to_all" else -1
        op = "sum" if kind in ("all_reduce", "reduce_scatter") else ""
        at = -1 if kind == "all_reduce" else dim
        halo = size // 4 if kind == "halo" else 0
        found.append(Collective(kind, axis, at, to_dim, op, "bfloat16", size, halo))
    return found


@pytest.mark.parametrize("name", PROFILES)
def test_the_certificate_prices_collectives_as_the_planner(name: str) -> None:
    profile = PROFILES[name]
    for mesh in MESHES:
        rates = Rates(mesh, profile)
        for axis, n in enumerate(mesh.shape):
            link = mesh.link(axis)
            assert rates.link_of(axis) == link
            for c in collectives(axis):
                assert rates.alone_s(c) == pytest.approx(
                    collective_time(c, n, link, profile), rel=1e-12
                ), c
            for c in (c for c in collectives(axis) if c.kind in BUCKETED):
                assert rates.share_s(c) == pytest.approx(
                    share_of_bucket(c, n, link, profile), rel=1e-12
                )
                members = [c.bytes // 4, c.bytes // 2]
                assert rates.bucket_s(c, members) == pytest.approx(
                    bucket_time(c, n, link, profile, members), rel=1e-12
                )
                assert rates.most_in_bucket(c) == most_put_in(c.kind, n)
        for kind, size in itertools.product(HOST_KINDS, BYTES) if profile.host is not None else ():
            c = Collective(kind, -1, -1, -1, "", "float32", size)
            assert rates.alone_s(c) == pytest.approx(collective_time(c, 1, "", profile), rel=1e-12)


@pytest.mark.parametrize("name", PROFILES)
def test_the_certificate_prices_transfers_between_stages_as_the_planner(name: str) -> None:
    profile = PROFILES[name]
    for mesh, size in itertools.product(MESHES, BYTES):
        axis = mesh.names[0]
        own, theirs = wire_between(axis, mesh, profile, 0, 1), wire(axis, mesh, profile, 0, 1)
        assert sent_s(own, size) == pytest.approx(theirs.time_s(size), rel=1e-12)
        assert handed_on_s(axis, mesh, profile, size) == pytest.approx(
            output_broadcast_s(axis, mesh, profile, size), rel=1e-12
        )


@pytest.mark.parametrize("subject", ["dropout", "vocabulary", "attention", "images"])
def test_the_certificate_prices_ops_as_the_planner(subject: str) -> None:
    trace, kinds = SUBJECTS[subject].trace, set[str]()
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        call = call_of(node)
        done = works(call.target, call.args, call.kwargs, call.inputs, call.outputs)
        assert is_free(call.target) == all(w.kind == "view" for w, _ in done), call.target
        assert product_dtype(call.inputs) == computes_in(call.inputs)
        if call.target in _IN_PASSES or is_free(call.target):
            continue
        ((each, times),) = done
        assert times == 1 and count_work(call, call.inputs, call.outputs, mirrored=False) == (
            each.flops,
            each.bytes,
        ), call.target
        kinds.add(each.kind)
        for profile in PROFILES.values():
            own = Rates(Mesh(1), profile).op_s(each.kind, each.flops, each.bytes, torch.float32)
            assert own == pytest.approx(compute_time(each, torch.float32, profile), rel=1e-12)
    assert {"elementwise", "reduction"} <= kinds


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_plans_of_every_subject_are_certified(subject: str) -> None:
    found = SUBJECTS[subject].check(SUBJECTS[subject].planned[1])
    assert found.ok, str(found)
