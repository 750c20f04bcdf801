"""A fingerprint names weights by what the files hold, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from skydraft.engines.checkpoint import weights_fingerprint

_BIG = bytes(range(256)) * 8192  # 2 MiB


def kept(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(parents=True)
    paths = [folder / name for name in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        path.write_bytes(content)
    return paths


@pytest.mark.parametrize("content", [b"", b"x", bytes(70_000), _BIG])
def test_the_same_bytes_elsewhere_are_the_same_weights(tmp_path: Path, content: bytes) -> None:
    here, there = kept(tmp_path / "a", w=content), kept(tmp_path / "b" / "c", w=content)
    found = weights_fingerprint(here)
    assert found == weights_fingerprint(there)
    assert len(found) == 32 and set(found) <= set("0123456789abcdef")


def test_the_order_in_which_files_are_named_says_nothing(tmp_path: Path) -> None:
    one, two = kept(tmp_path / "a", first=b"1", second=b"2")
    assert weights_fingerprint([one, two]) == weights_fingerprint([two, one])


@pytest.mark.parametrize(
    ("whole", "at"),
    [*((_BIG, at) for at in (0, 1, 65_535, 140_000, 1_000_000, len(_BIG) - 1)),
     *((_BIG[:65_536], at) for at in range(0, 65_536, 9_001))],
)  # fmt: skip
def test_another_byte_in_a_sampled_place_is_another_model(tmp_path: Path, whole: bytes, at: int) -> None:
    # 16 pieces of 64 KiB cover half of 2 MiB, where pieces begin at every 135 KiB, and all of a small file.
    starts = [start * (len(whole) - 65_536) // 15 for start in range(16)]
    changed = bytearray(whole)
    changed[at] ^= 1
    same = weights_fingerprint(kept(tmp_path / "a", w=whole)) == weights_fingerprint(kept(tmp_path / "b", w=changed))
    assert same != any(start <= at < start + 65_536 for start in starts)


def test_another_size_is_another_model_even_where_all_bytes_are_alike(tmp_path: Path) -> None:
    prints = {weights_fingerprint(kept(tmp_path / str(size), w=bytes(size))) for size in (0, 1, 65_536, 65_537, 10**6)}
    assert len(prints) == 5


def test_a_file_more_or_less_is_another_model(tmp_path: Path) -> None:
    one = kept(tmp_path / "a", first=b"1", second=b"2")
    assert len({weights_fingerprint(one), weights_fingerprint(one[:1]), weights_fingerprint(one[1:])}) == 3
