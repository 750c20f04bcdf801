"""Lines of records made by hand, small and valid, to be broken by tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from skydraft.evaluation.records import GenerationLine, ModelEntry, PromptEntry, RoundEntry, RunLine, ScoreLine

_MODEL = ModelEntry(name="toy", fingerprint="f", invariant_rows=8, forward_ms=(1.0, 1.5))


def run_line(**changes: Any) -> RunLine:
    given: dict[str, Any] = {
        "started": "2026-01-01T00:00:00+00:00",
        "machine": "a machine",
        "versions": {"skydraft": "0.1.0"},
        "command": "skydraft compare",
        "draft": _MODEL,
        "target": _MODEL,
        "vocab_fingerprint": "v",
        "execution": "exact",
        "modes": ("edge", "cloud"),
        "repetitions": 1,
        "max_new_tokens": 3,
        "overrides": {"max_new_tokens": 3},
        "workload": "p.txt",
        "workload_sha256": "0" * 64,
        "prompts": (PromptEntry(id="a", prompt="今天"), PromptEntry(id="b", prompt="你好", references=("好",))),
        "links": (None,),
        "link_prompts": 8,
    }
    return RunLine(**(given | changes))


def round_line(**changes: Any) -> RoundEntry:
    given: dict[str, Any] = {
        "base": 2, "num_draft": 3, "num_accepted": 2, "num_committed": 3, "outcome": "verified", "reason": "always",
        "ended_by": "k", "draft_ms": 3.0, "wall_ms": 10.0, "ended_ms": 12.0, "num_passes": 1, "num_rows": 4,
        "forward_ms": 5.0, "prefill_ms": 1.0, "queue_ms": 0.0, "rtt_ms": 0.0, "bytes_up": 0, "bytes_down": 0,
        "num_audited": 0, "num_agreed": 0, "draft_ids": (1, 2, 3), "signals": ((0.5, 0.5, 0.75),) * 3,
    }  # fmt: skip
    return RoundEntry(**(given | changes))


def generation(**changes: Any) -> GenerationLine:
    given: dict[str, Any] = {
        "prompt": "a",
        "mode": "edge",
        "repetition": 0,
        "link_ms": None,
        "finish": "length",
        "num_prompt_tokens": 2,
        "wall_ms": 20.0,
        "token_ids": (1, 2, 3),
        "origins": ("accepted", "accepted", "recovered"),
        "pieces": ("我", "在", "。"),
        "rounds": (round_line(),),
    }
    return GenerationLine(**(given | changes))


def score(**changes: Any) -> ScoreLine:
    given: dict[str, Any] = {
        "prompt": "a",
        "style": None,
        "token_ids": (1, 2, 3),
        "choices": (1, 2, 4),
        "choice_pieces": ("我", "在", "，"),
        "nll": (0.1, 0.2, 1.5),
        "signals": ((0.5, 0.5, 0.75),) * 3,
        "drafted": (1, 2, 3),
    }
    return ScoreLine(**(given | changes))


def text_of(*lines: BaseModel) -> str:
    return "".join(line.model_dump_json(by_alias=True) + "\n" for line in lines)


def write(folder: Path, *lines: BaseModel) -> Path:
    """A file of records in a folder."""
    path = folder / "records.jsonl"
    path.write_text(text_of(*lines), encoding="utf-8")
    return path
