"""A fingerprint names weights by what the files hold, wherever they lie."""

from pathlib import Path

import pytest

from skydraft.engines.checkpoint import weights_fingerprint

_BIG = bytes(range(256)) * 8192  # 2 MiB


def named(folder: Path, *contents: bytes) -> str:
    folder.mkdir(parents=True)
    files = [folder / str(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert weights_fingerprint(files) == weights_fingerprint(files[::-1])
    return weights_fingerprint(files)


def test_only_the_bytes_of_all_files_count(tmp_path: Path) -> None:
    found = named(tmp_path / "a", b"1", b"2")
    assert found == named(tmp_path / "b" / "c", b"1", b"2") and len(found) == 32 and int(found, 16) >= 0
    others = [named(tmp_path / str(size), bytes(size)) for size in (0, 1, 65_536, 65_537, 10**6)]
    assert len({found, named(tmp_path / "d", b"1"), named(tmp_path / "e", b"2"), *others}) == 8


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
    same = named(tmp_path / "a", whole) == named(tmp_path / "b", changed)
    assert same != any(start <= at < start + 65_536 for start in starts)
