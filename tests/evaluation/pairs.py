"""Toy pairs with prompts to compare them on, in Python and through the command line; records as plain objects; and the
calibration fitted to a pair.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skydraft.cli.main import run
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.engines.toy import open_toy
from skydraft.gating.calibration import Calibration
from skydraft.gating.fitting import fit
from skydraft.lab.evaluation.comparison import ComparisonRequest, LoadedPair, compare
from skydraft.lab.evaluation.records import PromptEntry, Records, read_records
from skydraft.lab.evaluation.workloads import Workload
from skydraft.lab.learning.calibrating import label_texts, side_of
from skydraft.prompts.messages import asked

NUM_TOKENS = 64
_CHARACTERS = "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面"


@cache
def prompts(seed: int, num_prompts: int = 30) -> tuple[str, ...]:
    """Prompts of six characters, the same in every run."""
    rng = np.random.default_rng(seed)
    return tuple("".join(rng.choice(list(_CHARACTERS), 6)) for _ in range(num_prompts))


def workload(seed: int, num_prompts: int = 30) -> Workload:
    lines = enumerate(prompts(seed, num_prompts), 1)
    return Workload("toys", "0" * 64, tuple(PromptEntry(id=f"line-{n}", prompt=p) for n, p in lines))


@cache
def pair(drift: float) -> tuple[Engine, Engine]:
    return open_toy(f"toy:drift={drift}"), open_toy("toy")


def compared(asked: ComparisonRequest, out: Path, sides: tuple[Engine, Engine]) -> tuple[Records, list[str]]:
    """(the records, what was said to the user), everything else counted in between."""
    said: list[str] = []

    @contextmanager
    def counted(total: int, what: str, done: int = 0) -> Iterator[Callable[[], None]]:
        steps: list[int] = []
        yield lambda: steps.append(1)
        said.append(f"{done + len(steps)} of {total} {what}")

    return read_records(compare(asked, LoadedPair(*sides, EngineOptions()), out, said.append, counted)), said


@cache
def calibration(drift: float) -> Calibration:
    """The calibration of the pair, fitted on the prompts of seed 0."""
    edge, cloud = pair(drift)
    texts = label_texts(edge, cloud, map(asked, prompts(0)), NUM_TOKENS, lambda: None)
    return fit(texts, side_of(edge), side_of(cloud), "toys", NUM_TOKENS)


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


def compare_toys(folder: Path, *args: str, modes: str, tokens: int = 24) -> Path:
    write_prompts(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYDRAFT_HOME", str(folder / "home"))
        assert run(compare_args(folder, *args, modes=modes, tokens=tokens)) == 0
    return folder / "out"


def read_lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text(encoding="utf-8").split("\n") if line]


def generations(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_lines(out) if line["kind"] == "generation"]
