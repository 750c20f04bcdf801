"""The files of adapters: kept, and taken back."""

import errno
import itertools
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import NotEnoughDisk
from skydraft.models.adapters import MAX_BEFORE, all_adapters, keep, revert


def keep_many(num: int, cache: Path, model: str = "m") -> Path:
    """The folder of an adapter that has come so many times."""
    return [keep(b"%d" % number, "one", model, cache) for number in range(num)][-1].parent


def test_the_last_three_before_are_kept_and_come_back_in_turn(tmp_path: Path) -> None:
    keep(b"here", "one", ".", tmp_path)
    assert all_adapters(tmp_path) == {".": ["one"]} and not revert("one", ".", tmp_path)
    home = keep_many(6, tmp_path, "org/model")
    assert home == tmp_path / "adapters" / "org%2Fmodel" / "one"
    shutil.copytree(home, home.with_name("one copied"))  # no request could name it
    assert all_adapters(tmp_path) == {"org/model": ["one"]}
    for number in range(5, 5 - MAX_BEFORE, -1):
        assert (home / "adapter.gguf").read_bytes() == b"%d" % number
        assert revert("one", "org/model", tmp_path)
    assert not revert("one", "org/model", tmp_path) and not all_adapters(tmp_path)


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("at", range(3))
def test_a_kill_or_a_full_disk_loses_none_but_the_oldest(
    at: int, fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any move. The one in use came twice."""
    cache, other = tmp_path / "a", tmp_path / "b"
    home, moves, move = keep_many(4, cache), itertools.count(), os.replace

    def die(*paths: Any) -> None:
        if next(moves) == at:
            raise fault
        move(*paths)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt, NotEnoughDisk):
        patch.setattr(os, "replace", die)
        keep(b"4", "one", "m", cache)
    files = [home / "adapter.gguf", *sorted(home.glob("before-?.gguf"), reverse=True)]
    assert {b"1", b"2", b"3"} <= {path.read_bytes() for path in files}
    shutil.copytree(cache, other)
    used = files[0].read_bytes()
    assert revert("one", "m", other)
    assert (other / files[0].relative_to(cache)).read_bytes() == b"%d" % (int(used) - 1)
    keep(b"5", "one", "m", cache)
    kept = [path.read_bytes() for path in (files[0], *sorted(home.glob("before-?.gguf"), reverse=True))]
    assert kept == [b"5", used, *kept[2:]] and kept == sorted(kept, reverse=True) and len({*kept}) == len(kept) >= 3


def test_what_was_taken_back_is_not_learned_again_by_a_timer(tmp_path: Path) -> None:
    note = keep_many(2, tmp_path) / "last-run"
    note.write_text("KEY is in use")
    assert revert("one", "m", tmp_path) and note.read_text() == "KEY was taken back"
    assert not revert("one", "m", tmp_path) and not note.exists()  # nothing is in use, so nothing was learned
