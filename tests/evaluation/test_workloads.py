"""Prompt files: what is read from them, which prompts are chosen, and what is refused in one line."""

import hashlib
from pathlib import Path

import pytest

from skydraft.config import CAPTION_PROMPT
from skydraft.errors import PromptError
from skydraft.lab.evaluation.records import PromptEntry
from skydraft.lab.evaluation.workloads import read_prompts

from .lines import assert_refused, jsonl


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("lines.txt", "  今 \n\n你好\r\nlast", {"line-1": "今", "line-3": "你好", "line-4": "last"}),
    ("objects.jsonl", '{"prompt": "一"}\n{"prompt": "二", "id": "b", "note": "none"}', {"line-1": "一", "b": "二"}),
    # A byte order mark is no text, and a prompt may hold any character.
    ("marked.txt", "\ufeffa\u2028b", {"line-1": "a\u2028b"}),
    ("marked.jsonl", '\ufeff{"prompt": "a\u2028b"}', {"line-1": "a\u2028b"}),
])  # fmt: skip
def test_prompts_are_read_in_order_and_a_limit_takes_the_first_of_the_same_file(
    tmp_path: Path, name: str, content: str, expected: dict[str, str]
) -> None:
    (tmp_path / name).write_bytes(content.encode())
    for limit in (None, 1, 2):
        found = read_prompts(tmp_path / name, limit=limit)
        assert found.name == name and found.sha256 == hashlib.sha256(content.encode()).hexdigest()
        assert [(each.id, each.prompt) for each in found.prompts] == [*expected.items()][:limit]


def test_a_recording_lies_beside_its_file_and_asks_about_its_speaker(tmp_path: Path) -> None:
    spoken = {"prompt": "说", "audio": "sub/b.flac", "id": "b", "category": "food"}
    first, second = read_prompts(jsonl(tmp_path / "p.jsonl", {"audio": "a.flac"}, spoken)).prompts
    assert first == PromptEntry(id="line-1", prompt=CAPTION_PROMPT, audio=str(tmp_path / "a.flac"))
    assert second == PromptEntry(**spoken | {"audio": str(tmp_path / "sub" / "b.flac")})


@pytest.mark.parametrize(("name", "content", "says"), [
    ("p.txt", b"", "holds no prompt."), ("p.txt", b"\xff\xfe", "not UTF-8"),
    ("p.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "Line 2"), ("p.jsonl", b'{"prompt": " "}\n', "Line 1 of"),
    ("p.jsonl", b'{"id": "a"}\n', "neither a prompt nor audio"),
    ("p.jsonl", b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "same id"),
])  # fmt: skip
def test_what_is_no_workload_is_one_clear_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    assert_refused(read_prompts, tmp_path / name, content, says, PromptError)
