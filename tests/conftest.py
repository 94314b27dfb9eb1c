"""What all tests share: one thread, repeatable examples, golden texts."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

gc.set_threshold(
    100_000, 20, 20
)  # modules, plans and graphs are many small objects, of which few are garbage

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from hypothesis import settings  # noqa: E402

TESTS = Path(__file__).parent
GOLDEN = TESTS / "golden"
IN_TESTS = "AUTOPAR_TESTS_CACHE"  # in the environment, so that pytest-xdist's workers know it
NIGHTLY = TESTS / "nightly.txt"
LONG = (
    "tests/unit/test_notebooks.py",
    "tests/unit/test_readme.py",
)  # each has one test that takes longest of all, and comes last
SETTLED = 50_000  # objects: fewer are walked in no time
sys.path[:0] = [
    str(TESTS),
    str(TESTS / "support"),
]  # what tests share: small models, plans written by hand

# Without a deadline: times on a busy machine say nothing. Derandomised: the same commit passes or
# fails everywhere.
settings.register_profile("nightly", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("autopar", settings.get_profile("nightly"), max_examples=25)
settings.load_profile("autopar")
# Several ranks share a few cores; also inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

import shared_captures  # noqa: E402
import stored_captures  # noqa: E402

from autopar.core import terminal  # noqa: E402

terminal._AFTER_S = 3600.0  # what is logged does not depend on how busy the machine is


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden texts instead of comparing with them",
    )
    parser.addoption(
        "--fresh-captures",
        action="store_true",
        help="trace a model anew each time a test captures it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fresh-captures"):
        os.environ[shared_captures.FRESH] = "1"
    if stored_captures.FOLDER not in os.environ:  # pytest-xdist's workers find it there
        folder = tempfile.TemporaryDirectory()
        os.environ[stored_captures.FOLDER] = folder.name
        config.add_cleanup(lambda: _forget(folder))

    # The cache is the run's own. Plans are not taken from it, apart from the tests of the cache:
    # others change the planner.
    if not os.environ.get(IN_TESTS):
        caches = tempfile.TemporaryDirectory()
        os.environ.update(
            {"AUTOPAR_CACHE_DIR": caches.name, "AUTOPAR_CACHE": "rules", IN_TESTS: "1"}
        )
        config.add_cleanup(caches.cleanup)


def _forget(captures: tempfile.TemporaryDirectory[str]) -> None:
    os.environ.pop(stored_captures.FOLDER)
    captures.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what ``nightly.txt`` lists as slow; files that take long begin first, so that no worker
    ends alone.

    Raises:
        UsageError: where it lists what is not there, or all cases of a test.
    """
    items.sort(key=lambda item: item.nodeid.split("::")[0] not in LONG)
    listed = {
        line
        for line in NIGHTLY.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    }
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.slow)
    if any("::" in argument for argument in config.args):
        return  # not all cases of a file are here
    collected, files = (
        {item.nodeid for item in items},
        {item.nodeid.split("::")[0] for item in items},
    )
    always = {_function(item.nodeid) for item in items if item.get_closest_marker("slow") is None}
    wrong = [
        case
        for case in sorted(listed)
        if case.split("::")[0] in files and (case not in collected or _function(case) not in always)
    ]
    if wrong:
        raise pytest.UsageError(
            f"{NIGHTLY.name} lists cases that are not there, or all of a test: " + ", ".join(wrong)
        )


def pytest_collection_finish() -> None:
    """What has been imported and collected stays until the end: the garbage collector need not
    walk it again and again."""
    _settle()


def _settle() -> None:
    gc.collect()
    gc.freeze()


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


@pytest.fixture(autouse=True, scope="module")
def no_process_group() -> Iterator[None]:
    """What `autopar.compile` has started in a module's tests is no part of the next one's."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def captures() -> Iterator[None]:
    """A model that a test of this process captured is not traced again; tests of capturing have
    a `captures` of their own."""
    shared_captures.share()
    yield
    shared_captures.unshare()


@pytest.fixture(autouse=True, scope="module")
def garbage() -> Iterator[None]:
    """What a module's tests leave in caches stays, too."""
    yield
    if len(gc.get_objects(generation=2)) > SETTLED:
        _settle()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("name.txt", text)`` compares `text` with ``tests/golden/name.txt``."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{name} is not there yet: run pytest --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return compare
