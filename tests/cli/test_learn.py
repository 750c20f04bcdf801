"""`skydraft learn` and --learn on the toy pair: what is kept, what is said, what is forgotten."""

import io
import json
from pathlib import Path

import pytest

from .conftest import TOYS, Invoke


def collect(invoke: Invoke, folder: Path, *prompts: str) -> None:
    for prompt in prompts:
        status, _, err = invoke("generate", prompt, *TOYS, "--k", "5", "-n", "12", "-q", "--learn", str(folder))
        assert status == 0
        assert "are kept in" in err and "learn forget" in err


def test_the_text_is_the_same_and_what_was_said_is_there(invoke: Invoke, tmp_path: Path) -> None:
    asks = ("generate", "你好", *TOYS, "--k", "5", "-n", "12", "-q")
    _, plain, err = invoke(*asks)
    assert not err and not list(tmp_path.rglob("lessons*"))  # without the option nothing is kept
    assert invoke(*asks, "--learn", str(tmp_path / "l"))[1] == plain
    _, out, _ = invoke("learn", "export", str(tmp_path / "l"), *TOYS[:2])
    kept = json.loads(out)
    assert (kept["prompt"], kept["text"]) == ("你好", plain.strip())
    assert len(kept["marks"]) == 12


def test_status_counts_and_forget_deletes(invoke: Invoke, tmp_path: Path) -> None:
    folder = tmp_path / "l"
    assert "is not a folder" in invoke("learn", "status", str(folder))[2]
    collect(invoke, folder, "你好", "我们", "他在")
    with (folder / "lessons.jsonl").open("a") as file:
        file.write("poison\n")
    _, out, _ = invoke("learn", "status", str(folder))
    says = ("3 answers of 36 tokens", "confirmed 36 of", "21 more are needed", "1 lines are cut, damaged")
    assert all(each in out for each in says), out
    assert len(invoke("learn", "export", str(folder), *TOYS[:2])[1].splitlines()) == 3
    assert "1 files deleted" in invoke("learn", "forget", str(folder))[1]
    assert "0.0 MB in 0 files" in invoke("learn", "status", str(folder))[1]


def test_where_nothing_is_checked_nothing_can_be_learned(invoke: Invoke, tmp_path: Path) -> None:
    for args in (("generate", "你好", *TOYS, "--mode", "edge"), ("gateway", "--edge-only", "--edge-model", "toy")):
        status, _, err = invoke(*args, "--learn", str(tmp_path / "l"))
        assert status == 2 and "nothing is checked" in err.splitlines()[-1]


def test_a_conversation_is_kept_too(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("你好\n我们\n".encode())))
    assert invoke("chat", *TOYS, "-n", "8", "--k", "5", "--learn", str(tmp_path / "l"))[0] == 0
    assert "2 answers" in invoke("learn", "status", str(tmp_path / "l"))[1]
