"""Lines of records made by hand, small and valid, to be broken by tests."""

import io
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from skydraft.config import decoding_params
from skydraft.errors import SkydraftError
from skydraft.lab.evaluation.modes import Mode, parse_modes
from skydraft.lab.evaluation.records import (
    GenerationLine,
    ModelEntry,
    PromptEntry,
    RoundEntry,
    RunLine,
    ScoreLine,
    write_line,
)
from skydraft.types import Cost, StepRecord

MODEL = ModelEntry(name="toy", fingerprint="f", invariant_rows=8, forward_ms=(1.0, 1.5))


def modes(text: str, num_tokens: int = 3) -> tuple[Mode, ...]:
    return parse_modes(text, lambda style: decoding_params(style, max_new_tokens=num_tokens))


run_line = partial(
    RunLine, started="2026-01-01T00:00:00+00:00", machine="a machine", versions={"skydraft": "0.1.0"},
    command="skydraft compare", draft=MODEL, target=MODEL, vocab_fingerprint="v", execution="exact",
    modes=modes("edge,cloud"), repetitions=1, workload="p.txt", workload_sha256="0" * 64,
    prompts=(PromptEntry(id="a", prompt="今天"), PromptEntry(id="b", prompt="你好")),
)  # fmt: skip
# A round that was escalated: two of three drafts accepted, one token recovered.
record = partial(
    StepRecord, round=0, base=0, num_draft=3, num_accepted=2, num_committed=3, outcome="verified", reason="always",
    wall_ms=10.0, ended_ms=12.0, draft=Cost(2, 2, forward_ms=3.0), target=Cost(1, 4, forward_ms=5.0, prefill_ms=1.0),
)  # fmt: skip
round_line = partial(
    RoundEntry, record=record(), ended_by="k", draft_ids=(1, 2, 3), signals=((0.5, 0.5, 0.75),) * 3,
)  # fmt: skip
generation = partial(
    GenerationLine, prompt="a", mode="edge", repetition=0, finish="length", num_prompt_tokens=2, wall_ms=20.0,
    token_ids=(1, 2, 3), origins=("accepted", "accepted", "recovered"), pieces=("我", "在", "。"),
    rounds=(round_line(),),
)  # fmt: skip


def score(token_ids: tuple[int, ...] = (1, 2, 3), **changes: Any) -> ScoreLine:
    """The target and the draft model agree with every token."""
    num, given = len(token_ids), dict.fromkeys(("token_ids", "choices", "drafted"), token_ids)
    figures = {"choice_pieces": ("我",) * num, "nll": (0.5,) * num, "signals": ((0.5, 0.5, 0.75),) * num}
    return ScoreLine(**({"prompt": "a", "style": None} | given | figures | changes))


def jsonl(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """As on a full disk, no file of this process grows beyond so many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def assert_refused(read: Any, path: Path, content: bytes | None, says: str, error: type[SkydraftError]) -> None:
    """A file of this content (None: no file) is refused in one line, which names it and says why."""
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error) as caught:
        read(path)
    assert says in str(caught.value) and path.name in str(caught.value) and "\n" not in str(caught.value)


def text_of(*lines: BaseModel) -> str:
    file = io.StringIO()
    for line in lines:
        write_line(file, line)
    return file.getvalue()


def write(folder: Path, *lines: BaseModel) -> Path:
    (path := folder / "records.jsonl").write_text(text_of(*lines), encoding="utf-8")
    return path
