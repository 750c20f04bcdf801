"""`vllm serve`, as its OpenAI server takes and gives token ids (read in 0.32)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from skydraft.config import DecodingParams
from skydraft.edge.stock.dialect import (
    Body,
    ListsModels,
    Read,
    Row,
    choices,
    field,
    log_probability,
    name,
    number,
    numbers,
    openai_usage,
    sampling,
)
from skydraft.errors import CloudFailure

_ID = "token_id:"


class Vllm(ListsModels):
    """Writes at /v1/completions."""

    name = "vllm"
    life = "/health"
    salt, separates = "cache_salt", True

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        body: dict[str, Any] = {
            "model": model, "prompt": list(token_ids), "max_tokens": num_tokens, **sampling(drawn),
            "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "skip_special_tokens": False,  # the edge decides where a text ends
        }  # fmt: skip
        body |= {"logprobs": num_best, "return_tokens_as_token_ids": True} if num_best else {}
        return "/v1/completions", body

    def written(self, event: Any) -> Read:
        rows = tuple(row for choice in choices(event) for row in _rows(choice))
        return Read(rows, openai_usage(event), name(event.get("model")))


def _rows(choice: Any) -> list[Row]:
    token_ids = numbers(field(choice, "token_ids") or [])
    listed = (choice.get("logprobs") or {}).get("top_logprobs") or [None] * len(token_ids)
    if len(listed) != len(token_ids):
        raise CloudFailure("The server sent log-probabilities of other tokens.")
    return [Row(token_id, _best(best)) for token_id, best in zip(token_ids, listed, strict=True)]


def _best(best: Any) -> tuple[tuple[int, float], ...]:
    if not best:
        return ()
    if not isinstance(best, dict) or not all(key.startswith(_ID) and key[len(_ID) :].isdecimal() for key in best):
        raise CloudFailure("The server does not name the tokens of its log-probabilities by their ids.")
    return tuple((number(int(key[len(_ID) :])), log_probability(value)) for key, value in best.items())
