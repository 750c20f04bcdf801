"""What is known of a model's files as they are opened: which engine it is, the fingerprint of its weights, the context
that a gateway chooses by itself, and what is closed again."""

from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.cli.options.pair import ModelChoice
from skydraft.engines import fitting
from skydraft.engines.checkpoints.engine import is_omni, weights_fingerprint
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError

THINKER = '"audio_config": {}, "text_config": {}, "vision_config": {}}'
GB = 10**9


def fingerprint_of(folder: Path, *contents: bytes) -> str:
    folder.mkdir(parents=True)
    files = [folder / str(number) for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert weights_fingerprint(files) == weights_fingerprint(files[::-1])
    return weights_fingerprint(files)


@pytest.mark.parametrize(("config", "expected"), [
    ('{"model_type": "qwen2_5_omni", "thinker_config": {' + THINKER + "}", True),
    ('{"model_type": "qwen2_5_omni_thinker", ' + THINKER, True),
    ('{"model_type": "qwen2_5_omni_thinker", "audio_config": {}}', False),  # transformers would make up the rest
    *((text, False) for text in ('{"model_type": "qwen2_5_omni", "thinker_config": null}', '{"model_type": []}', "[]")),
    ("", False), ("\udcff", False),
])  # fmt: skip
def test_a_thinker_is_known_by_its_config(config: str, expected: bool, tmp_path: Path) -> None:
    assert not is_omni(tmp_path)
    (tmp_path / "config.json").write_bytes(config.encode(errors="surrogateescape"))
    assert is_omni(tmp_path) == expected


def test_a_model_is_closed_again_where_the_adapter_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = open_toy("toy")
    monkeypatch.setattr("skydraft.api.open_engine", lambda *_: toy)
    with pytest.raises(OptionError, match="has no adapter 'nobody'"):
        skydraft.load("toy", adapter="nobody")
    assert toy.lock.is_closed


def test_only_the_bytes_of_all_files_count(tmp_path: Path) -> None:
    found = fingerprint_of(tmp_path / "a", b"1", b"2")
    assert found == fingerprint_of(tmp_path / "b" / "c", b"1", b"2") and len(found) == 32 and int(found, 16) >= 0
    others = [b"1", b"2", *(bytes(size) for size in (0, 1, 65_536, 65_537, 10**6))]
    others += [b"1" + bytes(10**6 - 1), bytes(10**6 - 1) + b"1"]  # the first byte and the last one count
    assert len({found, *(fingerprint_of(tmp_path / str(at), content) for at, content in enumerate(others))}) == 10


@pytest.mark.parametrize(("trained", "token_bytes", "free_gb", "told"), [
    ((131_072, 32_768), (12_288, 28_672), 22.0, (32_768, 7 * 32_768, "as the models were trained")),
    ((131_072, 65_536), (12_288, 28_672), 900.0, (32_768, 7 * 32_768, "enough for coding agents")),
    ((32_768, 32_768), (12_288, 28_672), 8.0, (32_768, 73_242, "as the models were trained")),
    ((32_768, 32_768), (12_288, 28_672), 6.0, (24_064, 48_828, "half of the free memory")),  # and six short ones
    ((32_768, 32_768), (12_288, 28_672), 0.5, (4096, 7 * 4096, "half of the free memory")),  # as of every program
    ((2048, 32_768), (12_288, 28_672), 8.0, (2048, 7 * 2048, "as the models were trained")),
    ((32_768, 32_768), (0, 0), 8.0, (4096, 7 * 4096, "half of the free memory")),  # the header does not say
])  # fmt: skip
def test_the_context_is_the_longest_that_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Any, token_bytes: Any, free_gb: float, told: Any
) -> None:
    length, total, why = told
    paths = [tmp_path / "0", tmp_path / "1"]
    facts = {path: each for path, *each in zip(paths, trained, token_bytes, strict=True)}
    for path in paths:
        with path.open("wb") as file:
            file.truncate(GB)
    monkeypatch.setattr(fitting, "load_library", lambda: None)
    monkeypatch.setattr(fitting, "kv_facts", lambda library, path: facts[path])
    monkeypatch.setattr(fitting, "free_bytes", lambda: int(free_gb * GB))
    *chosen, line = fitting.fitting_context(paths, 7)
    assert chosen == [length, total] and f" {length} tokens" in line and why in line


@pytest.mark.parametrize(("memory", "most", "used", "free"), [
    ("MemAvailable: 1000 kB\n", "9000", "8500\nanon 1\ninactive_file 4000\n", 4500),
    ("MemFree: 1 kB\nMemAvailable:    1000 kB\n", "max", "5", 1000 * 1024),
    ("MemAvailable: 1000 kB\n", "9000", "1000", 8000),
    ("MemAvailable: 1 kB\n", "9000", "1000", 1024),
    ("MemAvailable: 1000 kB\n", "9000", "9500", 0),
    ("MemAvailable: 1000 kB\n", None, None, 1000 * 1024),
])  # fmt: skip
def test_free_memory_is_that_of_the_container(tmp_path: Path, memory: str, most: Any, used: Any, free: int) -> None:
    (tmp_path / "meminfo").write_text(memory)
    used, _, stat = (used or "").partition("\n")
    for name, value in (("memory.max", most), ("memory.current", used), ("memory.stat", stat)):
        if value:
            (tmp_path / name).write_text(f"{value}\n")
    assert fitting.free_bytes(tmp_path / "meminfo", tmp_path) == free


def test_a_given_context_a_gpu_and_models_of_other_kinds_stay_as_they_are() -> None:
    for models in (ModelChoice(), ModelChoice(fits_context=True)):
        assert models.fitted(["toy", "toy:drift=0.2"], 7) is models
