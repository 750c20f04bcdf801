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
    """Writes and checks at /generate: the log-probabilities of a prompt's end are those along the draft.

    Its cache is used up to `logprob_start_len`, so a check costs the rows of the draft.
    """

    name = "sglang"
    life = "/v1/models"  # /health writes a token first
    checks = True
    salt, separates = "extra_key", False  # it was ignored until April 2026

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        return "/generate", {**_body(token_ids, num_tokens, drawn), **_probabilities(num_best), "stream": True}

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

    def checking(
        self, model: str, token_ids: Seq[int], draft: Seq[int], num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        body = _body([*token_ids, *draft], 1, drawn) | _probabilities(max(num_best, 1))
        return "/generate", {**body, "logprob_start_len": len(token_ids) - 1}

    def checked(self, answer: Any, num_rows: int) -> Read:
        meta = _meta(answer)
        # The first entry has no value: nothing is known before it. The last choice is the written token's.
        along = field(meta, "input_top_logprobs")[1:] + field(meta, "output_top_logprobs")
        best = [_best(each) for each in along]
        if len(best) != num_rows or not all(best):
            raise CloudFailure(f"The server did not answer with {num_rows} rows of log-probabilities.")
        rows = tuple(Row(max(each, key=lambda one: one[1])[0], each) for each in best)
        return Read(rows, _usage(meta))


def _body(token_ids: Seq[int], num_tokens: int, drawn: DecodingParams | None = None) -> dict[str, Any]:
    how = sampling(drawn) | {"max_new_tokens": num_tokens, "ignore_eos": True}  # the edge decides where it ends
    return {"input_ids": list(token_ids), "sampling_params": how}


def _probabilities(num_best: int) -> dict[str, Any]:
    return {"return_logprob": True, "top_logprobs_num": num_best} if num_best else {}


def _meta(answer: Any) -> Any:
    return field(sound(answer), "meta_info")


def _usage(meta: Any) -> Usage:
    return Usage(count(meta, "prompt_tokens"), count(meta, "cached_tokens"), count(meta, "completion_tokens"))


def _best(listed: Any) -> tuple[tuple[int, float], ...]:
    """[log-probability, id, text] of each token as (id, log-probability)."""
    return tuple((number(field(each, 1)), log_probability(field(each, 0))) for each in listed or ())
