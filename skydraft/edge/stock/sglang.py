"""SGLang's own interface, /generate, as its published sources describe it (0.5.23). Never run by us."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from skydraft.config import DecodingParams
from skydraft.edge.stock.dialect import (
    Body,
    ListsModels,
    Read,
    Row,
    count,
    field,
    log_probability,
    number,
    numbers,
    sampling,
    sound,
)
from skydraft.edge.stock.ledger import Usage
from skydraft.errors import CloudFailure


class Sglang(ListsModels):
    """Writes at /generate."""

    name = "sglang"
    life = "/v1/models"  # /health writes a token first
    salt, separates = "extra_key", False  # it was ignored until April 2026

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        how = sampling(drawn) | {"max_new_tokens": num_tokens, "ignore_eos": True}  # the edge decides where it ends
        best = {"return_logprob": True, "top_logprobs_num": num_best} if num_best else {}
        return "/generate", {"input_ids": list(token_ids), "sampling_params": how, **best, "stream": True}

    def written(self, event: Any) -> Read:
        meta = _meta(event)
        token_ids = numbers(field(event, "output_ids"))
        listed = meta.get("output_top_logprobs") or [None] * len(token_ids)
        rows = tuple(Row(token_id, _best(best)) for token_id, best in zip(token_ids, listed, strict=False))
        if len(rows) != len(token_ids):
            raise CloudFailure("The server sent log-probabilities of other tokens.")
        num_written = number(field(meta, "completion_tokens"))
        if num_written < len(rows):
            raise CloudFailure(f"The server sent {len(rows)} tokens, and counts {num_written}.")
        return Read(rows, _usage(meta), num_written=num_written)


def _meta(answer: Any) -> Any:
    return field(sound(answer), "meta_info")


def _usage(meta: Any) -> Usage:
    return Usage(count(meta, "prompt_tokens"), count(meta, "cached_tokens"), count(meta, "completion_tokens"))


def _best(listed: Any) -> tuple[tuple[int, float], ...]:
    """[log-probability, id, text] of each token as (id, log-probability)."""
    return tuple((number(field(each, 1)), log_probability(field(each, 0))) for each in listed or ())
