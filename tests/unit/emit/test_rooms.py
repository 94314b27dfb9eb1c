"""The bytes that early steps may hold at each place of a phase."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from autopar.emit.overlap import Room, places

PIECES = (
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 20)),
        max_size=6,
        unique_by=lambda piece: piece[0],
    )
    .map(sorted)
    .map(tuple)
)


@given(st.integers(0, 20), PIECES, st.integers(0, 35), st.integers(0, 35))
def test_least_room_of_a_range_is_the_minimum_over_its_places(
    most: int, pieces: tuple[tuple[int, int], ...], a: int, b: int
) -> None:
    room, (first, last) = Room(most, pieces), sorted((a, b))

    def at(place: int) -> int:
        size = most
        for since, piece in pieces:
            if since <= place:
                size = min(piece, most)
        return size

    assert [room.at(place) for place in range(36)] == [at(place) for place in range(36)]
    assert room.least(first, last) == min(map(at, range(first, last + 1)))


def test_places_count_only_nodes_of_the_spine() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    first = graph.call_function(abs, (x,))
    gathered = graph.call_function(abs, (y,))
    gathered.meta["slack"] = "prefetchable"
    critical = graph.call_function(abs, (gathered,))
    critical.meta["slack"] = "critical"
    output = graph.output((first, critical))
    assert list(places(graph)) == [(x, 0), (y, 0), (first, 0), (critical, 1), (output, 2)]
