"""A cache folder is used only if no other user can write to it. Otherwise the process uses a new
folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.core.private_folder import find_foreign, private_folder, warn_once

OTHER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")


def find(wanted: Path) -> Path:
    return private_folder(wanted, "tests", "name another")


@pytest.fixture(autouse=True)
def fresh() -> None:
    warn_once.cache_clear()


def test_a_folder_is_created_with_access_for_its_owner_only(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = find(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    assert made == tmp_path / "a" / "b" == find(made)
    assert {each.stat().st_mode & 0o777 for each in (made, made.parent)} == {0o700}


def _open_to_all(folder: Path) -> None:
    folder.chmod(0o777)


def _open_to_group(folder: Path) -> None:
    folder.chmod(0o770)


def _sticky(folder: Path) -> None:
    folder.chmod(0o1777)


def _give_away(folder: Path) -> None:
    os.chown(folder, OTHER, -1)


def _open_above(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _give_away_above(folder: Path) -> None:
    os.chown(folder.parent, OTHER, -1)


def _linked(folder: Path) -> None:
    """Replace the folder by a link to one that another user can write to."""
    folder.rename(folder.with_name("theirs"))
    folder.with_name("theirs").chmod(0o777)
    folder.symlink_to(folder.with_name("theirs"))


def _linked_above(folder: Path) -> None:
    folder.parent.rename(folder.parent.with_name("theirs"))
    folder.parent.with_name("theirs").chmod(0o777)
    folder.parent.symlink_to(folder.parent.with_name("theirs"))


SHARED = (_open_to_all, _open_to_group, _sticky, _open_above, _linked, _linked_above)


@pytest.mark.parametrize(
    "share",
    [*SHARED, *(pytest.param(each, marks=needs_root) for each in (_give_away, _give_away_above))],
    ids=lambda each: each.__name__,
)
def test_a_folder_that_others_can_write_is_not_used(
    share: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = find(tmp_path / "above" / "cache")
    (wanted / "planted").touch()
    share(wanted)
    made = find(wanted)
    assert made != wanted and not list(made.iterdir()) and made.stat().st_mode & 0o777 == 0o700
    assert find(wanted) == made and len(caplog.records) == 1
    assert str(wanted) in caplog.text and "name another" in caplog.text and str(made) in caplog.text
    assert (wanted / "planted").exists()


def test_links_to_own_folders_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(find(tmp_path / "own"))
    assert find(tmp_path / "link" / "cache") == tmp_path / "own" / "cache"


def test_the_owner_must_be_the_current_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = find(tmp_path / "cache")
    uid = os.getuid()
    for name in ("getuid", "geteuid"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda: uid + 1)
            assert find(wanted) != wanted


def test_a_sticky_parent_folder_such_as_tmp_is_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert find(tmp_path / "cache") == tmp_path / "cache"


def test_a_folder_that_cannot_be_created_raises_the_system_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wanted in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(OSError, match="file"):
            find(wanted)


def test_files_must_be_regular_and_own(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("x")
    link.symlink_to(file)
    file.chmod(0o644)
    assert (
        find_foreign(file) == ""
        and "not a plain file" in find_foreign(link)
        and "not a plain" in find_foreign(tmp_path)
    )
    file.chmod(0o664)
    assert "other users can write" in find_foreign(file)
    if os.getuid() == 0:
        file.chmod(0o600)
        os.chown(file, OTHER, -1)
        assert f"belongs to user {OTHER}" in find_foreign(file)
    with pytest.raises(FileNotFoundError):
        find_foreign(tmp_path / "none")


def test_a_new_folder_is_removed_when_the_process_ends(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    lines = (
        "import os, pathlib, sys",
        "from autopar.core.private_folder import private_folder",
        "made = private_folder(pathlib.Path(sys.argv[1]), 'tests', 'name another')",
        "if os.fork() == 0: sys.exit()",
        "os.wait()",
        "assert made.is_dir()",
        "print(made)",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "cache")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.strip() and not Path(said.strip()).exists()
