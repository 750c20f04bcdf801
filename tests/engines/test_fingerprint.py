"""A fingerprint names weights by what the files hold, wherever they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from skydraft.engines.checkpoint import weights_fingerprint

_BIG = bytes(range(256)) * 8192  # 2 MiB


def kept(folder: Path, **contents: bytes) -> list[Path]:
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def test_only_the_bytes_of_all_files_count(tmp_path: Path) -> None:
    one, same = kept(tmp_path / "a", first=b"1", second=b"2"), kept(tmp_path / "b" / "c", first=b"1", second=b"2")
    found = weights_fingerprint(one)
    assert found == weights_fingerprint(same[::-1]) and len(found) == 32 and int(found, 16) >= 0
    assert len({found, weights_fingerprint(one[:1]), weights_fingerprint(one[1:])}) == 3
    sizes = {weights_fingerprint(kept(tmp_path / str(size), w=bytes(size))) for size in (0, 1, 65_536, 65_537, 10**6)}
    assert len(sizes) == 5


@pytest.mark.parametrize(
    ("whole", "at"),
    [*((_BIG, at) for at in (0, 65_535, 140_000, len(_BIG) - 1)),
     *((_BIG[:65_536], at) for at in range(0, 65_536, 19_001))],
)  # fmt: skip
def test_another_byte_in_a_sampled_place_is_another_model(tmp_path: Path, whole: bytes, at: int) -> None:
    # 16 pieces of 64 KiB cover half of 2 MiB, where pieces begin at every 135 KiB, and all of a small file.
    starts = [start * (len(whole) - 65_536) // 15 for start in range(16)]
    changed = bytearray(whole)
    changed[at] ^= 1
    same = weights_fingerprint(kept(tmp_path / "a", w=whole)) == weights_fingerprint(kept(tmp_path / "b", w=changed))
    assert same != any(start <= at < start + 65_536 for start in starts)
