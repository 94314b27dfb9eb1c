"""The protocols of products and routes under ThreadSanitizer: they have no races, and each planted
fault is detected.

Faults are planted in a copy of the sources, so that the sources need no switches for tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.kernels import build

KERNELS = ("all_gather_matmul.cu", "matmul_reduce_scatter.cu", "moe_route.cu", "expert_rows.cu")
DRIVERS = {
    "overlap_driver.cpp": KERNELS[:2],
    "blocks_driver.cpp": KERNELS[:2],
    "route_driver.cpp": KERNELS[2:3],
    "rows_driver.cpp": KERNELS[3:],
}
RACE, WRONG_STATUS, RACE_FOUND = "data race", 2, 66
TIMED_OUT = "status 2"

PULLED = """      AP_TRY(place(lane, s, gathered, shard, owner, chunk));
      AP_TRY(lane.signal(own + chunk_flag(s, position, chunk), epoch));
"""
PUBLISHED = """  AP_TRY(lane.copy(source + source_offset(s, epoch), num_bytes, x, num_bytes, num_bytes, 1));
  AP_TRY(lane.signal(flags + own_flag(), epoch));
"""  # noqa: E501
READY = "    AP_TRY(lane.wait(flags[owner] + own_flag(), epoch));\n"
MADE = "      AP_TRY(lane.wait(flags[s.rank] + chunk_flag(s, position, chunk), epoch));\n"
PRODUCED = "return lane.signal(flags + chunk_flag(s, position, chunk), epoch);"
PUSHED = "    AP_TRY(lane.signal(flags[owner] + peer_flag(s.rank), epoch));\n"
PUSHING = f"""    for (int64_t chunk = 0; chunk < s.num_chunks; ++chunk) {{
      const Block b = block_of(s, owner, chunk);
{MADE}\
      AP_TRY(lane.copy(slot + b.in_shard, b.shard_pitch, partial + b.in_whole, b.whole_pitch, b.width, b.height));
    }}
{PUSHED}"""  # noqa: E501
CAME = "    if (peer != s.rank) AP_TRY(lane.wait_for_pushed(flags + peer_flag(peer), epoch));"
SOURCE, INBOX = (
    "return int64_t(epoch % 2) * slot_bytes(s);",
    "return (int64_t(epoch % 2) * s.size + from) * slot_bytes(s);",
)
MAPS, ROUTES, BLOCKS = "include/shards.h", "include/routes.h", "include/blocks.h"
LAST, BARRIER = "% gridDim.x == gridDim.x - 1", "    __syncthreads();\n"
ANNOUNCED = """    AP_TRY(lane.copy(static_cast<char*>(memory[peer]) + place, num_bytes, from, num_bytes, num_bytes, 1));
    AP_TRY(lane.signal(flags[peer] + counts_flag(r.rank), epoch));
"""  # noqa: E501
COUNTS = (
    "  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags[r.rank] +"
    " counts_flag(peer), epoch));\n"
)
TOLD = (
    "  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.signal(flags[peer] + rows_flag(r,"
    " r.rank), epoch));\n"
)
SENT = (
    "  AP_TRY(push_pairs(lane, r, x, experts, within, table, offsets, peers_at(r.size, memory),"
    " position));\n"
)
GIVEN = "  AP_TRY(return_rows(lane, r, rows, table, peers_at(r.size, memory), epoch));\n"
ROWS = (
    "  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags[r.rank] +"
    " rows_flag(r, peer), epoch));\n"
)
TOLD_ALL = "  return tell(lane, r, flags, epoch);\n"
WRITTEN = {
    "counts": (
        "  for (int64_t peer = 0; peer < r.size; ++peer) memcpy(tables.at[peer] + size_t(r.rank) *"
        " num_bytes, counts, num_bytes);\n"
    ),
    "rows": "  AP_TRY(push_rows(lane, r, x, index, table, peers_at(r.size, memory)));\n",
    "results": "  AP_TRY(return_rows(lane, r, rows, table, peers_at(r.size, memory)));\n",
}
COUNTED = "  AP_TRY(await(lane, r, flags, epoch));\n"
COME = (
    "  for (int64_t peer = 0; peer < r.size; ++peer) AP_TRY(lane.wait_for_pushed(flags +"
    " come_flag(peer), epoch));\n"
)
RETURNS = "return int64_t(epoch % 2) * in_lines(r.most * r.row_bytes);"


def swapped(lines: str) -> str:
    first, second = lines.splitlines(keepends=True)
    return second + first


def told_before(what: str) -> tuple[str, str, str]:
    """Move the signals in expert_rows.cu before the writes that they announce."""
    return (
        KERNELS[3],
        WRITTEN[what] + TOLD_ALL,
        f"  AP_TRY(tell(lane, r, flags, epoch));\n{WRITTEN[what]}  return AP_OK;\n",
    )


def untold(what: str) -> tuple[str, str, str]:
    return KERNELS[3], WRITTEN[what] + TOLD_ALL, WRITTEN[what] + "  return AP_OK;\n"


# name: file, original text, planted text
EARLY = {
    "a chunk is signalled before it is copied": (KERNELS[0], PULLED, swapped(PULLED)),
    "a shard is signalled before it is copied": (KERNELS[0], PUBLISHED, swapped(PUBLISHED)),
    "a shard is read before it is ready": (KERNELS[0], READY, ""),
    "a source has one slot": (MAPS, SOURCE, SOURCE.replace("% 2", "% 1")),
    "a chunk is pushed before it is made": (KERNELS[1], MADE, ""),
    "a part is signalled before it is pushed": (
        KERNELS[1],
        PUSHING,
        PUSHED + PUSHING.removesuffix(PUSHED),
    ),
    "parts are added up before they came": (KERNELS[1], CAME, "    (void)peer;"),
    "an inbox has one slot per rank": (MAPS, INBOX, INBOX.replace("% 2", "% 1")),
    "the first block signals": (BLOCKS, LAST, "% gridDim.x == 0"),
    "a block arrives before all of its threads have": (
        BLOCKS,
        BARRIER + "    const bool is_last",
        "    const bool is_last",
    ),
    "one thread of a block waits": (BLOCKS, BARRIER + "    return AP_OK;", "    return AP_OK;"),
    "counts are signalled before they are copied": (KERNELS[2], ANNOUNCED, swapped(ANNOUNCED)),
    "rows are pushed before all counts came": (KERNELS[2], COUNTS, ""),
    "rows are signalled before they are pushed": (KERNELS[2], SENT + TOLD, TOLD + SENT),
    "rows are read before they came": (KERNELS[2], ROWS, ""),
    "rows are signalled before they are given back": (KERNELS[2], GIVEN + TOLD, TOLD + GIVEN),
    "counts are signalled before they are written": told_before("counts"),
    "the table is read before all counts came": (KERNELS[3], COUNTED, ""),
    "rows are signalled before they are written": told_before("rows"),
    "results are signalled before they are written": told_before("results"),
    "what came is read before it came": (KERNELS[3], COME, "  (void)lane, (void)flags;\n"),
    "rows come back into one slot": (ROUTES, RETURNS, RETURNS.replace("% 2", "% 1")),
}
MISSING = {
    "no chunk is signalled": (KERNELS[0], PULLED, PULLED.splitlines(keepends=True)[0]),
    "no shard is signalled": (KERNELS[0], PUBLISHED, PUBLISHED.splitlines(keepends=True)[0]),
    "no product is signalled": (KERNELS[1], PRODUCED, "return (void)lane, (void)flags, AP_OK;"),
    "no part is signalled": (KERNELS[1], PUSHED, ""),
    "no block signals": (BLOCKS, LAST, "% gridDim.x == gridDim.x"),
    "no counts are signalled": (KERNELS[2], ANNOUNCED, ANNOUNCED.splitlines(keepends=True)[0]),
    "no rows are signalled as pushed": (KERNELS[2], SENT + TOLD, SENT),
    "no rows are signalled as given back": (KERNELS[2], GIVEN + TOLD, GIVEN),
    "no counts are signalled as written": untold("counts"),
    "no rows are signalled as written": untold("rows"),
    "no results are signalled as written": untold("results"),
}
OFTEN = {
    "the first block signals",
    "a chunk is signalled before it is copied",
    "an inbox has one slot per rank",
    "rows come back into one slot",
    "the table is read before all counts came",
    "no part is signalled",
}


def cases(faults: Mapping[str, tuple[str, str, str]]) -> list[object]:
    """Return the cases. Most of them run only in the slow tests."""
    return [
        pytest.param(*fault, id=name, marks=() if name in OFTEN else pytest.mark.slow)
        for name, fault in faults.items()
    ]


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the headers. The compiled code is not cached."""
    if not build.has_compiler("host"):
        pytest.skip(
            "no C++ compiler: the kernels' protocols cannot be compiled for ThreadSanitizer"
        )
    monkeypatch.setenv("AUTOPAR_KERNEL_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    shutil.copytree(build.SOURCES / "include", folder / "include")
    return folder


def put_kernels(folder: Path, driver: str) -> None:
    """Copy the sources that a driver runs."""
    for name in DRIVERS[driver]:
        shutil.copy(build.SOURCES / name, folder / name)


def watched(
    folder: Path, driver: str, *arguments: object, variant: str = "thread"
) -> subprocess.CompletedProcess[str]:
    """Run a driver with ThreadSanitizer, with the kernels in `folder`."""
    program = build.build_program(Path(__file__).with_name(driver), variant, folder)
    environment = {**os.environ, "TSAN_OPTIONS": f"exitcode={RACE_FOUND}:halt_on_error=1"}
    command = [str(program.path), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if "FATAL: ThreadSanitizer" in done.stderr and shutil.which(
        "setarch"
    ):  # its shadow memory needs address randomization to be off
        command = ["setarch", os.uname().machine, "-R", *command]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
    if "FATAL: ThreadSanitizer" in done.stderr or "setarch: failed" in done.stderr:
        pytest.skip(
            f"ThreadSanitizer does not run on this machine: {done.stderr.strip().splitlines()[0]}"
        )
    return done


def plant(folder: Path, name: str, there: str, planted: str) -> str:
    """Plant a fault in the sources of a driver that detects it, and return the driver."""
    others = {
        KERNELS[2]: "route_driver.cpp",
        ROUTES: "route_driver.cpp",
        KERNELS[3]: "rows_driver.cpp",
        BLOCKS: "blocks_driver.cpp",
    }
    driver = others.get(name, "overlap_driver.cpp")
    put_kernels(folder, driver)
    text = (folder / name).read_text(encoding="utf-8")
    assert text.count(there) == 1
    (folder / name).write_text(text.replace(there, planted), encoding="utf-8")
    return driver


@pytest.mark.parametrize("num_epochs", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("driver", DRIVERS)
def test_the_protocols_have_no_race_and_correct_results(
    planted: Path, driver: str, num_epochs: int
) -> None:
    put_kernels(planted, driver)
    done = watched(planted, driver, num_epochs)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "there", "fault"), cases(EARLY))
def test_an_early_or_unawaited_signal_is_detected_as_a_race(
    planted: Path, name: str, there: str, fault: str
) -> None:
    done = watched(planted, plant(planted, name, there, fault), 50)
    assert done.returncode == RACE_FOUND, done.stderr
    assert RACE in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("name", "there", "fault"), cases(MISSING))
def test_a_missing_signal_ends_in_a_timeout(
    planted: Path, name: str, there: str, fault: str
) -> None:
    done = watched(planted, plant(planted, name, there, fault), 5)
    assert done.returncode == WRONG_STATUS, done.stderr
    assert TIMED_OUT in done.stderr


@pytest.mark.slow
def test_received_rows_must_not_be_read_after_the_next_step_is_announced(planted: Path) -> None:
    """The views of routed experts (`autopar.kernels.routed.send`) are valid until then. A rank that
    reads them later has a race with its peers."""
    put_kernels(planted, "rows_driver.cpp")
    done = watched(planted, "rows_driver.cpp", 50, "late")
    assert done.returncode == RACE_FOUND, done.stderr
    assert RACE in done.stderr
