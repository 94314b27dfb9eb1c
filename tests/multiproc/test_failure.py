"""Nothing hangs: a failing rank stops the others, and its message is shown."""

from __future__ import annotations

import pytest
import shared_captures
import torch.distributed as dist
import zoo_small
from harness import run_processes

from autopar.capture import capture

pytestmark = pytest.mark.multiproc


def fails_on_one_rank(rank: int) -> None:
    """Fail on rank 1 while rank 0 waits for it."""
    if rank == 1:
        raise ValueError("rank one has a reason")
    dist.barrier()


def test_the_first_failure_ends_all_ranks_and_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed.*rank one has a reason"):
        run_processes(2, __file__, "fails_on_one_rank")


@pytest.mark.slow
def test_a_compiled_program_with_collectives_follows_the_plain_model() -> None:
    assert max(run_processes(2, __file__, "compiled")) < 2e-6


def compiled(rank: int) -> float:
    """Return loss and gradients with Inductor on a 2×1 mesh."""
    from handwritten import Toy
    from worker_module import build, call, error, worst

    plain, parallel = Toy(), build(1, 2, backend="inductor")
    mine, theirs = call(parallel), call(plain)
    mine["loss"].backward()
    theirs["loss"].backward()
    return max(
        error(mine["loss"], theirs["loss"]),
        error(mine["logits"], theirs["logits"]),
        worst(parallel, plain, gradients=True),
    )


def test_ranks_do_not_trace_models_that_the_parent_process_has_captured() -> None:
    nodes = captured(0)
    assert run_processes(2, __file__, "captured_untraced") == [nodes, nodes]


def captured(rank: int) -> list[str]:
    """Return the names of the nodes of a small model."""
    model, batch = zoo_small.llama()
    return [node.name for node in capture(model, (), batch).graph.nodes]


def captured_untraced(rank: int) -> list[str]:
    """Return the names of the nodes although tracing fails."""
    del shared_captures._captured
    return captured(rank)
