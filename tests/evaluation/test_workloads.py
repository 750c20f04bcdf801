"""Prompt files: what is read from them, which prompts are chosen, and what is refused in one line."""

import hashlib
from pathlib import Path

import pytest

from skydraft.config import CAPTION_PROMPT
from skydraft.errors import PromptError
from skydraft.evaluation.records import PromptEntry
from skydraft.evaluation.workloads import read_prompts

from .lines import jsonl


def entry(id: str, prompt: str, category: str = "") -> PromptEntry:
    return PromptEntry(id=id, prompt=prompt, category=category)


def test_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_bytes("  今天天气 \n\n你好\r\nlast".encode())
    found = read_prompts(path)
    assert found.prompts == (entry("line-1", "今天天气"), entry("line-3", "你好"), entry("line-4", "last"))
    assert found.name == "p.txt"
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_lines_of_json(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "p.jsonl",
        {"prompt": "一"},
        {"prompt": "二", "id": "b", "category": "food"},
        {"prompt": "三", "references": ["z"], "note": "unknown fields are left alone"},
    )
    assert read_prompts(path).prompts == (entry("line-1", "一"), entry("b", "二", "food"), entry("line-3", "三"))


def test_a_limit_takes_the_first_prompts_of_the_same_file(tmp_path: Path) -> None:
    whole = read_prompts(jsonl(tmp_path / "p.jsonl", *({"prompt": name} for name in "abcdef")))
    found = read_prompts(tmp_path / "p.jsonl", limit=2)
    assert (found.prompts, found.sha256) == (whole.prompts[:2], whole.sha256)


def test_a_recording_lies_beside_its_file_and_asks_about_its_speaker(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "p.jsonl", {"audio": "a.flac"}, {"prompt": "说", "audio": "sub/b.flac", "id": "b"})
    first, second = read_prompts(path).prompts
    assert first == PromptEntry(id="line-1", prompt=CAPTION_PROMPT, audio=str(tmp_path / "a.flac"))
    assert second == PromptEntry(id="b", prompt="说", audio=str(tmp_path / "sub" / "b.flac"))


BROKEN: dict[str, tuple[str, bytes, str]] = {
    "empty": ("p.txt", b"", "holds no prompt."),
    "not UTF-8": ("p.txt", b"\xff\xfe", "not UTF-8"),
    "no JSON": ("p.jsonl", b'{"prompt": "a"}\n{"prompt"\n', "Line 2"),
    "no prompt": ("p.jsonl", b'{"id": "a"}\n', "neither a prompt nor audio"),
    "blank prompt": ("p.jsonl", b'{"prompt": " "}\n', "Line 1 of"),
    "an id twice": ("p.jsonl", b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}\n', "same id"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_no_workload_is_one_clear_line(tmp_path: Path, case: str) -> None:
    name, content, says = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PromptError) as caught:
        read_prompts(tmp_path / name)
    assert says in str(caught.value) and name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "line"), [("p.txt", "a\u2028b"), ("p.jsonl", '{"prompt": "a\u2028b"}')])
def test_a_byte_order_mark_is_no_text_and_a_prompt_may_hold_any_character(tmp_path: Path, name: str, line: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + line.encode())
    assert read_prompts(tmp_path / name).prompts == (entry("line-1", "a\u2028b"),)
