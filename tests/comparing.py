"""Comparisons of the toy pair through the command line, and their records as plain objects."""

import json
from pathlib import Path
from typing import Any

import pytest

from skydraft.cli.main import run

TOYS = ["--edge-model", "toy:drift=0.2", "--cloud-model", "toy"]
PROMPTS: list[dict[str, Any]] = [
    {"id": "weather", "prompt": "今天天气很好"},
    {"prompt": "语速平静"},
    {"prompt": "Say it slowly, please."},
    {"prompt": "温柔 <b>慢慢</b> & \"你好\"", "category": "marks"},
    {"id": "last", "prompt": "公园"},
]  # fmt: skip


def write_prompts(folder: Path, prompts: list[dict[str, Any]] | None = None) -> Path:
    path = folder / "prompts.jsonl"
    found = PROMPTS if prompts is None else prompts
    path.write_text("".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in found), encoding="utf-8")
    return path


def compare_args(folder: Path, *args: str, modes: str, tokens: int = 24) -> list[str]:
    """Arguments that compare the prompts in `folder`, to its folder `out`."""
    where = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "out")]
    pair = TOYS[:2] if "--cloud" in args else TOYS
    return ["compare", *where, *pair, "--modes", modes, "--max-new-tokens", str(tokens), *args]


def compared(folder: Path, *args: str, modes: str, tokens: int = 24) -> Path:
    write_prompts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYDRAFT_HOME", str(folder / "home"))
        assert run(compare_args(folder, *args, modes=modes, tokens=tokens)) == 0
    return folder / "out"


def read_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").split("\n") if line]


def generations(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(out) if line["kind"] == "generation"]
