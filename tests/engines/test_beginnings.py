"""Long fixed beginnings: read once, shared by conversations, and kept in files; the tokens are those without."""

import logging
import os
import random as randoms
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines import prefix_cache
from skydraft.engines.beginnings import Beginnings
from skydraft.errors import EngineError
from skydraft.types import Reuse
from tests.engines.test_prefix_cache import answer, as_fed, engine_of
from tests.toys import law

FIXED = [number % 17 for number in range(21)]
MINE = Reuse("mine", fixed_len=len(FIXED))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_cache, "MIN_LEN", 8)


def keeping(folder: Path, max_bytes: int = 10**6, **changes: Any) -> Any:
    """An engine as after a restart: what it knows is in the files."""
    engine = engine_of([1, 2, 3], **changes)
    engine.prefixes.files = Beginnings(folder, max_bytes)
    return engine


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


@law(60)
@given(st.integers(0, 2**32))
def test_texts_after_restarts_and_beside_each_other_are_those_of_an_engine_that_reads_all(seed: int) -> None:
    random = randoms.Random(seed)
    folder = Path(tempfile.mkdtemp()) / "kept"
    fixed = [random.randrange(20) for _ in range(random.randrange(30))]
    engine, held = keeping(folder), list[Any]()
    try:
        for _ in range(8):
            if random.random() < 0.3:
                engine, held = keeping(folder), []
            if random.random() < 0.3 and len(held) < 2:
                held.append(engine.open([*fixed, 5, 6], (), Reuse("0")))  # stays open: a source for others
            prompt = [*fixed, *(random.randrange(20) for _ in range(random.randrange(1, 12)))]
            reuse = Reuse(random.choice("01"), fixed_len=random.choice([0, len(fixed), len(fixed) // 2]))
            as_fed(engine, prompt, reuse)
    finally:
        shutil.rmtree(folder.parent)


def test_a_beginning_is_read_once_and_kept_over_a_restart(tmp_path: Path) -> None:
    engine = keeping(tmp_path / "kept")
    assert [answer(engine, [*FIXED, *[end] * 9], MINE)[2] for end in (7, 8)] == [0, 20]
    assert answer(keeping(tmp_path / "kept"), [*FIXED, 9], MINE)[2] == 20
    engine = keeping(tmp_path / "kept")
    assert answer(engine, [*FIXED[:5], 9, 9], Reuse("mine"))[2] == 0  # shares a part, the file all
    assert answer(engine, [*FIXED, 9], MINE)[2] == 20
    (path,) = files(tmp_path / "kept")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for other in (Reuse("bob", fixed_len=21), Reuse("mine"), None):  # another owner, no fixed beginning, no reuse
        assert answer(keeping(tmp_path / "kept"), [*FIXED, 9], other)[2] == 0
    for change in ({"kv_kind": "another model or library"}, {"max_batch_rows": 5}):
        assert answer(keeping(tmp_path / "kept", **change), [*FIXED, 9], MINE)[2] == 0
    assert answer(keeping(tmp_path / "kept"), [*FIXED[:-2], 3, 3, 3], MINE)[2] == 0  # other words


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:20], lambda data: b"", lambda data: data[:-3] + b"abc",
    lambda data: b"a" * 32 + data[32:], lambda data: data + b"a",
])  # fmt: skip
def test_a_damaged_file_is_deleted_with_a_line_and_the_prompt_is_read(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    answer(keeping(tmp_path), [*FIXED, 9], MINE)
    (path,) = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Path, "unlink", refused)  # the folder cannot be changed
        assert Beginnings(tmp_path, 10**6).read(path.stem) is None
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert as_fed(keeping(tmp_path), [*FIXED, 9], MINE)[1] == 0
    assert [record.getMessage().count("is damaged") for record in caplog.records] == [1]
    assert answer(keeping(tmp_path), [*FIXED, 9], MINE)[2] == 20  # written anew


def test_a_file_under_anothers_name_is_damaged(tmp_path: Path) -> None:
    answer(keeping(tmp_path), [*FIXED, 9], MINE)
    other = Reuse("bob", fixed_len=21)
    answer(keeping(tmp_path), [*FIXED, 9], other)
    one, two = files(tmp_path)
    data = one.read_bytes(), two.read_bytes()
    one.write_bytes(data[1])
    two.write_bytes(data[0])
    assert [answer(keeping(tmp_path), [*FIXED, 9], reuse)[2] for reuse in (MINE, other)] == [0, 0]


def test_what_an_engine_does_not_take_is_read(tmp_path: Path) -> None:
    answer(keeping(tmp_path), [*FIXED, 9], MINE)
    engine = keeping(tmp_path, restore=lambda sequence, kv: sequence.slot.extend([(1, 0)] * 3))
    assert as_fed(engine, [*FIXED, 9], MINE)[1] == 0


def test_who_has_most_loses_the_oldest_and_what_is_too_long_is_not_written(tmp_path: Path) -> None:
    kept = Beginnings(tmp_path, 1000)

    def write(owner: str, number: int, num_bytes: int) -> str:
        kept.write(key := Beginnings.key(owner, "", [number]), memoryview(bytes(num_bytes - 32)))
        if (tmp_path / f"{key}.kv").exists():
            os.utime(tmp_path / f"{key}.kv", (number, number))
        return key

    small = write("ann", 0, 100)
    keys = [write("bob", number, 300) for number in (1, 2, 3)]
    assert kept.read(small) and kept.read(keys[1])  # reading makes it the latest
    keys.append(write("bob", 4, 300))
    assert [kept.read(key) is not None for key in (small, *keys)] == [True, False, True, True, True]
    assert kept.read(write("bob", 5, 1033)) is None and kept.read(small)


def test_what_a_killed_process_left_half_written_counts_and_goes(tmp_path: Path) -> None:
    key, other = (Beginnings.key(owner, "", [1]) for owner in ("ann", "bob"))
    assert key[17:] != other[17:]  # the owner is in both parts of a name
    (left := tmp_path / f".{other}.kv-123456789abc").write_bytes(bytes(900))
    os.utime(left, (1, 1))
    Beginnings(tmp_path, 1000).write(key, memoryview(bytes(200)))
    assert not left.exists() and Beginnings(tmp_path, 1000).read(key)


def test_a_full_engine_goes_on_from_what_it_kept_though_no_file_has_it(tmp_path: Path) -> None:
    engine = keeping(tmp_path, max_sequences=1)
    answer(engine, [*FIXED, 9], MINE)
    assert answer(engine, [*FIXED[:9], 16, *FIXED[10:], 9], MINE)[2] == 8


def test_what_was_generated_and_then_copied_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    engine, loose = keeping(tmp_path), Reuse("0", exact=False)
    first = engine.open([5, 6, 7, 8, 9], (), loose)
    written = [9, *range(1, 12)]
    for token_id in written:
        first.extend([token_id])
    assert answer(engine, [5, 6, 7, 8, *written, 3], loose)[2] == 16
    first.discard()
    assert as_fed(engine, [5, 6, 7, 8, *written, 3], Reuse("0"))[1] == 4


@pytest.mark.parametrize("does", ["save", "copy", "restore"])
@pytest.mark.parametrize("error", [EngineError("no"), MemoryError()])
def test_what_an_engine_cannot_do_is_read_instead(tmp_path: Path, does: str, error: Exception) -> None:
    def fail(*_: Any) -> None:
        raise error

    if does == "restore":
        answer(keeping(tmp_path), [*FIXED, 9], MINE)
    engine = keeping(tmp_path)
    setattr(engine, does, fail) if does != "copy" else None
    answer(engine, [*FIXED, 9, 9], MINE)
    setattr(engine, does, fail)
    as_fed(engine, [*FIXED[:9], *[8] * 5], MINE)
    assert engine.prefixes.num_open == 0


def test_a_folder_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert answer(keeping(tmp_path / "file"), [*FIXED, 9], MINE)[2] == 0
    assert "is not kept" in caplog.text


def test_progress_is_told_while_a_prompt_is_read(tmp_path: Path) -> None:
    engine = keeping(tmp_path)
    sequence, told = engine.begin(prompt := [*FIXED, 9], (), None), []
    while engine.prefill(sequence, prompt):
        told.append(engine.prefixes.progress)
    assert told[0] == (4, 21) and told == sorted(told) and engine.prefixes.progress == (0, 0)
    broken = engine.begin(prompt, (), None)
    engine.prefill(broken, prompt)
    broken.close()
    left, forward = engine.begin(prompt, (), None), engine.forward

    def leaving(*given: Any, **how: Any) -> Any:
        closing = threading.Thread(target=left.close)  # of a client that leaves while a part is read
        closing.start()
        closing.join()
        return forward(*given, **how)

    engine.forward = leaving
    with pytest.raises(EngineError, match="closed"):
        engine.fill(left, prompt)
    assert engine.prefixes.progress == (0, 0)
