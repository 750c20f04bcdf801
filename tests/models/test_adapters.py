"""The files of adapters: kept, taken back, and what they were made from."""

import errno
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import NotEnoughDisk
from skydraft.files import write_whole
from skydraft.models.adapters import MAX_BEFORE, all_adapters, keep, made_from, revert


def test_the_last_three_before_are_kept_and_come_back_in_turn(tmp_path: Path) -> None:
    keep(b"here", "one", ".", tmp_path)
    assert all_adapters(tmp_path) == {".": ["one"]} and not revert("one", ".", tmp_path)
    for number in range(6):
        keep(b"%d" % number, "one", "org/model", tmp_path)
    home = tmp_path / "adapters" / "org%2Fmodel" / "one"
    assert all_adapters(tmp_path) == {"org/model": ["one"]}
    for number in range(5, 5 - MAX_BEFORE, -1):
        assert (home / "adapter.gguf").read_bytes() == b"%d" % number
        assert revert("one", "org/model", tmp_path)
    assert not revert("one", "org/model", tmp_path) and not all_adapters(tmp_path)


def test_who_forgets_hears_of_all_that_is_left(tmp_path: Path) -> None:
    for number in range(4):
        keep(b"%d" % number, "one", "m", tmp_path, [tmp_path / f"{number // 3}"])
    home = tmp_path / "adapters" / "m" / "one"
    (home / "before-1.gguf").unlink()
    assert revert("one", "m", tmp_path) and (home / "adapter.gguf").read_bytes() == b"1"
    assert made_from(tmp_path / "0", tmp_path) == [("m", "one")] and not made_from(tmp_path / "1", tmp_path)
    for number in range(4):
        assert made_from(tmp_path / "0", tmp_path) == [("m", "one")]
        keep(b"later %d" % number, "one", "m", tmp_path, [tmp_path / "2"])
    assert not made_from(tmp_path / "0", tmp_path)  # none of it is left


@pytest.mark.parametrize("at", range(8))
def test_a_kill_at_any_move_loses_none_but_the_oldest(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shifted the folders that they were made from, and the one in use came twice."""
    cache, other = tmp_path / "a", tmp_path / "b"
    for number in range(4):
        keep(b"%d" % number, "one", "m", cache, [tmp_path / f"{number}"])
    home, moves, move = cache / "adapters" / "m" / "one", itertools.count(), os.replace

    def die(*paths: Any) -> None:
        if next(moves) == at:
            raise KeyboardInterrupt
        move(*paths)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", die)
        keep(b"4", "one", "m", cache, [tmp_path / "4"])
    files = [home / "adapter.gguf", *sorted(home.glob("before-?.gguf"))]
    assert {b"1", b"2", b"3"} <= {path.read_bytes() for path in files}
    for path in files:
        assert made_from(tmp_path / path.read_text(), cache)
    shutil.copytree(cache, other)
    used = files[0].read_bytes()
    assert revert("one", "m", other)
    assert (other / files[0].relative_to(cache)).read_bytes() == b"%d" % (int(used) - 1)
    keep(b"5", "one", "m", cache, [tmp_path / "5"])
    kept = [path.read_bytes() for path in (files[0], *sorted(home.glob("before-?.gguf")))]
    assert kept == [b"5", used, *kept[2:]] and kept == sorted(kept, reverse=True) and len({*kept}) == len(kept) >= 3
    for path in kept:
        assert made_from(tmp_path / path.decode(), cache)
    assert not made_from(tmp_path / "0", cache) or b"0" in kept


def test_folders_with_any_name_are_known_again(tmp_path: Path) -> None:
    """One that is not UTF-8 ended a run after all of it; one with an empty line in its name was not known again."""
    for number, name in enumerate((b"d\xff", b"d\n\nnl", "语".encode())):
        folder = tmp_path / os.fsdecode(name)
        keep(b"%d" % number, "one", "m", tmp_path, [folder])
        assert made_from(folder, tmp_path) == [("m", "one")]
    (tmp_path / "adapters" / "m" / "one" / "made-from").write_bytes(b"\xff")
    assert made_from(tmp_path / "d", tmp_path) == []


def test_a_full_disk_loses_none_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        keep(b"%d" % number, "one", "m", tmp_path)
    for fails_at in (1, 2, 3):
        calls = itertools.count(1)

        def fill(path: Path, *args: Any, calls: Any = calls, fails_at: int = fails_at) -> None:
            if next(calls) == fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            write_whole(path, *args)

        with monkeypatch.context() as patch, pytest.raises(NotEnoughDisk):
            patch.setattr("skydraft.models.adapters.write_whole", fill)
            keep(b"new", "one", "m", tmp_path)
    assert keep(b"new", "one", "m", tmp_path).read_bytes() == b"new"
    for number in (4, 3, 2):
        assert revert("one", "m", tmp_path)
        assert (tmp_path / "adapters" / "m" / "one" / "adapter.gguf").read_bytes() == b"%d" % number


def test_what_was_taken_back_is_not_learned_again_by_a_timer(tmp_path: Path) -> None:
    for data in (b"one", b"two"):
        keep(data, "one", "m", tmp_path, (tmp_path,))
    note = tmp_path / "adapters" / "m" / "one" / "last-run"
    note.write_text("KEY is in use")
    assert made_from(tmp_path, tmp_path) == [("m", "one")]
    assert revert("one", "m", tmp_path) and note.read_text() == "KEY was taken back"
    assert not revert("one", "m", tmp_path) and not note.exists()  # nothing is in use, so nothing was learned
