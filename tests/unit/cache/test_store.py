"""Entries on disk: private to their user, written atomically, and limited in size."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cache import store
from autopar.core.private_folder import warn_once

KEY, OTHER = "ab" * 32, "cd" * 32
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("AUTOPAR_CACHE")
    warn_once.cache_clear()
    return tmp_path / "cache" / "entries"


def test_written_entry_is_read_back_and_private(folder: Path) -> None:
    assert store.read_entry(KEY) is None
    assert store.write_entry(KEY, "the plan\nin lines\n")
    assert store.read_entry(KEY) == "the plan\nin lines\n"
    assert store.read_entry(OTHER) is None
    assert {p.stat().st_mode & 0o777 for p in (folder, folder.parent)} == {0o700}
    assert [p.stat().st_mode & 0o777 for p in folder.iterdir()] == [0o600]


@pytest.mark.parametrize("damage", ["shortened", "changed", "emptied"])
def test_damaged_file_is_logged_once_and_removed(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file = folder / f"{KEY}.json"
    for _ in range(2):
        store.write_entry(KEY, "the plan")
        data = file.read_bytes()
        damaged = {"shortened": data[:-1], "changed": b"T" + data[1:], "emptied": b""}[damage]
        file.write_bytes(damaged)
        assert store.read_entry(KEY) is None
        assert not file.exists()
    assert [r.message for r in caplog.records] == [
        f"a cache entry is not used and will be replaced: {file} is damaged"
    ]


@needs_root
def test_file_of_another_user_is_removed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write_entry(KEY, "the plan")
    os.chown(folder / f"{KEY}.json", 12345, -1)
    assert store.read_entry(KEY) is None
    assert "belongs to user 12345" in caplog.text


@needs_root
def test_folder_of_another_user_is_not_used(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store.write_entry(KEY, "the plan")
    os.chown(folder, 12345, -1)
    assert store.read_entry(KEY) is None
    assert "is not used for cached plans and captures" in caplog.text
    store.write_entry(OTHER, "another")
    assert store.read_entry(OTHER) == "another", "the process uses a private folder"
    assert [p.name for p in folder.iterdir()] == [f"{KEY}.json"]


def test_folder_writable_by_others_is_not_used(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.write_entry(KEY, "the plan")
    folder.chmod(0o777)
    assert store.read_entry(KEY) is None
    assert "other users can write to" in caplog.text


def test_least_recently_used_entries_are_removed_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["a" * 64, "b" * 64, "c" * 64]
    for age, key in enumerate(keys):
        store.write_entry(key, "x" * 1000)
        at_s = time.time() - 100.0 + age
        os.utime(folder / f"{key}.json", (at_s, at_s))
    store.read_entry(keys[0])
    monkeypatch.setattr(store, "MAX_BYTES", 3500)
    store.write_entry("d" * 64, "x" * 1000)
    assert {e.path.stem[0] for e in store.entries()} == {"a", "c", "d"}, (
        "b is the least recently used entry"
    )


def test_partial_file_of_a_killed_process_is_removed(folder: Path) -> None:
    store.write_entry(KEY, "the plan")
    old, new = folder / "old.part", folder / "new.part"
    for part in (old, new):
        part.write_text("half a pl", encoding="utf-8")
    os.utime(old, (0.0, 0.0))
    store.write_entry(OTHER, "another")
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


@pytest.mark.parametrize("value", ["0", "rules"])
def test_environment_variable_disables_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    store.write_entry(KEY, "the plan")
    monkeypatch.setenv("AUTOPAR_CACHE", value)
    assert store.read_entry(KEY) is None
    assert not store.write_entry(OTHER, "another")
    monkeypatch.setenv("AUTOPAR_CACHE", "rules,plans")
    assert store.read_entry(KEY) == "the plan"
    assert store.read_entry(OTHER) is None


def test_environment_variables_set_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOPAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.entry_folder() == Path("/somewhere/autopar/entries")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert store.entry_folder() == Path("/home/me/.cache/autopar/entries")


WRITER = """
import sys
from autopar.cache import store
for turn in range(200):
    text = sys.argv[1] * 20000
    store.write_entry("ab" * 32, text)
    found = store.read_entry("ab" * 32)
    assert found is not None and len(found) == 20000 and len(set(found)) == 1, found[:40]
"""


def test_concurrent_writers_of_an_entry_read_complete_entries() -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, each], stderr=subprocess.PIPE, text=True)
        for each in "xyz"
    ]
    assert [writer.communicate()[1] for writer in writers] == ["", "", ""]


def test_clear_removes_all_entries(folder: Path) -> None:
    assert store.clear() == (0, 0)
    for key in (KEY, OTHER):
        store.write_entry(key, "the plan")
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    assert store.clear() == (2, num_bytes)
    assert list(folder.iterdir()) == []
