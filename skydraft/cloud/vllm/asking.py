"""Requests to vLLM's worker process and its answers, as plain values that both sides check.

The token ids are the request's prompt. An answer is bytes, since an exception in a pooler would end the engine.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, get_args

from skydraft.config import DecodingParams
from skydraft.errors import EngineError, GrammarRefused
from skydraft.types import DraftBlock, FinishReason, Verdict

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asking:
    """One block to judge. A request's ids are `seen_len` ids of prompt and judged text, `num_catch_up` ids to audit,
    and then the draft.

    `chooser` names the parameters, which are sent once: later `params` is "", as the worker knows them.
    """

    chooser: str
    params: str
    prompt_len: int
    seen_len: int
    num_catch_up: int
    max_new_tokens: int
    top: int

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_len <= self.seen_len <= _MOST:
            raise ValueError(f"a prompt of {self.prompt_len} tokens in {self.seen_len}")
        if min(self.num_catch_up, self.top) < 0 or self.top > _MOST or not 1 <= self.max_new_tokens <= _MOST:
            raise ValueError("a number is out of range")

    def sent(self) -> dict[str, Any]:
        """The `extra_kwargs` of a request: text and small whole numbers, which any serializer takes."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Asking:
        """The inverse of `sent`. Raises ValueError for anything else."""
        kinds = {"chooser": str, "params": str}
        names = [field.name for field in dataclasses.fields(cls)]
        if sorted(given) != sorted(names) or any(type(given[name]) is not kinds.get(name, int) for name in names):
            raise ValueError("this is no question of skydraft's")
        return cls(**given)


def params_text(params: DecodingParams) -> str:
    """Parameters as text for `read_params`; floats keep all their digits."""
    return json.dumps(dataclasses.asdict(params))


def read_params(text: str) -> DecodingParams:
    """Parameters from their text."""
    given = json.loads(text)
    given["stop"] = tuple(given["stop"])
    given["logit_bias"] = tuple((token_id, bias) for token_id, bias in given["logit_bias"])
    return DecodingParams(**given)


def verdict_answer(verdict: Verdict) -> bytes:
    """The answer that holds a verdict."""
    names = ("num_accepted", "token_id", "finish", "audit", "audit_ranks")
    return json.dumps({name: getattr(verdict, name) for name in names}).encode()


UNKNOWN_CHOOSER = b'{"error": "chooser"}'  # the worker does not know the parameters, or forgot them
ROWS_MISSING = b'{"error": "rows"}'  # needed rows were in the prefix cache, which keeps no hidden states


def error_answer(error: Exception) -> bytes:
    """The answer that stands for an exception."""
    kind = "grammar" if isinstance(error, GrammarRefused) else "failed"
    return json.dumps({"error": kind, "message": f"{type(error).__name__}: {error}"[:1000]}).encode()


def read_answer(data: bytes, block: DraftBlock, catch_up: Seq[int], vocab_size: int) -> Verdict:
    """The verdict on `block`, checked for plausibility. Raises the worker's GrammarRefused, or EngineError."""
    try:
        given = json.loads(data)
    except ValueError as error:
        raise EngineError("The answer of vLLM's worker is not valid text.") from error
    if "error" in given:
        kind = GrammarRefused if given["error"] == "grammar" else EngineError
        raise kind(str(given.get("message", given["error"])).removeprefix("GrammarRefused: "))
    try:
        verdict = Verdict(
            block.base,
            given["num_accepted"],
            given["token_id"],
            given["finish"],
            tuple(map(bool, given["audit"])),
            tuple(map(int, given["audit_ranks"])),
        )
        is_whole = verdict.num_accepted <= len(block.token_ids) and len(verdict.audit) == len(catch_up)
        is_token = verdict.token_id is None or 0 <= verdict.token_id < vocab_size
        if not (is_whole and is_token and verdict.finish in (None, *get_args(FinishReason))):
            raise ValueError("it does not fit the block")
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"vLLM's worker answered no verdict: {error}.") from error
    return verdict
