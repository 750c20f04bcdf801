"""A fingerprint names weights by what the files hold, wherever they lie."""

from pathlib import Path

from skydraft.engines.checkpoints.engine import weights_fingerprint


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
    others = [b"1", b"2", *(bytes(size) for size in (0, 1, 65_536, 65_537, 10**6))]
    others += [b"1" + bytes(10**6 - 1), bytes(10**6 - 1) + b"1"]  # the first byte and the last one count
    assert len({found, *(named(tmp_path / str(at), content) for at, content in enumerate(others))}) == 10
