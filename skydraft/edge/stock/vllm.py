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
    """Writes and checks at /v1/completions: a list of prompts, each a draft's token longer, is answered in one step."""

    name = "vllm"
    life = "/health"
    checks = True
    salt, separates = "cache_salt", True

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        body = _body(model, list(token_ids), num_tokens, num_best) | sampling(drawn)
        return "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}

    def written(self, event: Any) -> Read:
        rows = tuple(row for choice in choices(event) for row in _rows(choice))
        return Read(rows, openai_usage(event), name(event.get("model")))

    def checking(
        self, model: str, token_ids: Seq[int], draft: Seq[int], num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        prompts = [[*token_ids, *draft[:length]] for length in range(len(draft) + 1)]
        return "/v1/completions", _body(model, prompts, 1, num_best) | sampling(drawn)

    def checked(self, answer: Any, num_rows: int) -> Read:
        by_index = {number(field(choice, "index")): _rows(choice) for choice in choices(answer)}
        if sorted(by_index) != list(range(num_rows)) or not all(len(rows) == 1 for rows in by_index.values()):
            raise CloudFailure(f"The server did not answer {num_rows} prompts with a token each.")
        return Read(tuple(by_index[at][0] for at in range(num_rows)), openai_usage(answer), name(answer.get("model")))


def _body(model: str, prompt: list[Any], num_tokens: int, num_best: int) -> dict[str, Any]:
    body = {
        "model": model, "prompt": prompt, "max_tokens": num_tokens, **sampling(None), "return_token_ids": True,
        "ignore_eos": True, "skip_special_tokens": False,  # the edge decides where a text ends
    }  # fmt: skip
    return body | ({"logprobs": num_best, "return_tokens_as_token_ids": True} if num_best else {})


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
