"""Servers that take and give token ids: vLLM (read in 0.32), SGLang (by its published sources, never run by us), and
llama-server of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from skydraft.config import DecodingParams
from skydraft.edge.stock.dialect import (
    Body,
    Described,
    Read,
    Row,
    TokenTuple,
    choices,
    count,
    field,
    items,
    log_probability,
    name,
    number,
    numbers,
    openai_usage,
    sound,
)
from skydraft.edge.stock.ledger import Usage
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure

_ID = "token_id:"


class _ListsModels:
    """What vLLM and SGLang share: the list of models, and the tokens of a text."""

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> list[Described]:
        listed = items(field(await wire.get("/v1/models", timeout_s), "data"))
        known = [Described(name(field(each, "id")), count(each, "max_model_len")) for each in listed]
        return [each for each in known if model in (None, each.model)]

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return numbers(field(await wire.post("/tokenize", body, timeout_s), "tokens"))


def _sampled(drawn: DecodingParams | None) -> dict[str, Any]:
    """How tokens are drawn, in the words that vLLM and SGLang share."""
    if drawn is None:
        return {"temperature": 0}
    top_k = drawn.top_k or -1
    return {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": top_k, "min_p": drawn.min_p}


class Vllm(_ListsModels):
    """Writes at /v1/completions."""

    name = "vllm"
    life = "/health"
    salt, separates = "cache_salt", True

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        body: dict[str, Any] = {
            "model": model, "prompt": list(token_ids), "max_tokens": num_tokens, **_sampled(drawn),
            "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "skip_special_tokens": False,  # the edge decides where a text ends
        }  # fmt: skip
        body |= {"logprobs": num_best, "return_tokens_as_token_ids": True} if num_best else {}
        return "/v1/completions", body

    def written(self, event: Any) -> Read:
        rows = tuple(row for choice in choices(event) for row in _vllm_rows(choice))
        return Read(rows, openai_usage(event), name(event.get("model")))


def _vllm_rows(choice: Any) -> list[Row]:
    token_ids = numbers(field(choice, "token_ids") or [])
    listed = (choice.get("logprobs") or {}).get("top_logprobs") or [None] * len(token_ids)
    if len(listed) != len(token_ids):
        raise CloudFailure("The server sent log-probabilities of other tokens.")
    return [Row(token_id, _vllm_best(best)) for token_id, best in zip(token_ids, listed, strict=True)]


def _vllm_best(best: Any) -> tuple[tuple[int, float], ...]:
    if not best:
        return ()
    if not isinstance(best, dict) or not all(key.startswith(_ID) and key[len(_ID) :].isdecimal() for key in best):
        raise CloudFailure("The server does not name the tokens of its log-probabilities by their ids.")
    return tuple((number(int(key[len(_ID) :])), log_probability(value)) for key, value in best.items())


class Sglang(_ListsModels):
    """Writes at /generate."""

    name = "sglang"
    life = "/v1/models"  # /health writes a token first
    salt, separates = "extra_key", False  # it was ignored until April 2026

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        how = _sampled(drawn) | {"max_new_tokens": num_tokens, "ignore_eos": True}  # the edge decides where it ends
        best = {"return_logprob": True, "top_logprobs_num": num_best} if num_best else {}
        return "/generate", {"input_ids": list(token_ids), "sampling_params": how, **best, "stream": True}

    def written(self, event: Any) -> Read:
        meta = _meta(event)
        token_ids = numbers(field(event, "output_ids"))
        listed = meta.get("output_top_logprobs") or [None] * len(token_ids)
        rows = tuple(Row(token_id, _sglang_best(best)) for token_id, best in zip(token_ids, listed, strict=False))
        if len(rows) != len(token_ids):
            raise CloudFailure("The server sent log-probabilities of other tokens.")
        num_written = number(field(meta, "completion_tokens"))
        if num_written < len(rows):
            raise CloudFailure(f"The server sent {len(rows)} tokens, and counts {num_written}.")
        return Read(rows, _sglang_usage(meta), num_written=num_written)


def _meta(answer: Any) -> Any:
    return field(sound(answer), "meta_info")


def _sglang_usage(meta: Any) -> Usage:
    return Usage(count(meta, "prompt_tokens"), count(meta, "cached_tokens"), count(meta, "completion_tokens"))


def _sglang_best(listed: Any) -> tuple[tuple[int, float], ...]:
    """[log-probability, id, text] of each token as (id, log-probability)."""
    return tuple((number(field(each, 1)), log_probability(field(each, 0))) for each in listed or ())


class LlamaServer:
    """Writes at /completion.

    A stream tells a token whose text ends within a character only when the character is whole, and then the last token
    alone. So the tokens before it are asked for one by one, not as a stream.
    """

    name = "llama-server"
    life = "/health"
    salt, separates = "", False

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> list[Described]:
        props = await wire.get("/props", timeout_s)
        path, alias = name(field(props, "model_path")), name(props.get("model_alias"))
        file = path.rpartition("/")[2]
        if model is not None and model not in {each for each in (alias, path, file) if each}:
            return []
        # Without --alias it is the file's name, or "unknown" in older versions: other files have those too.
        model = path if alias in ("", "unknown", file) else alias
        return [Described(model, count(props, "default_generation_settings", "n_ctx"))]

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        return numbers(field(await wire.post("/tokenize", body, timeout_s), "tokens"))

    def writing(
        self, model: str, token_ids: Seq[int], num_tokens: int, num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        return "/completion", {
            "prompt": list(token_ids), "n_predict": num_tokens, "n_probs": num_best, **_sampling(drawn),
            "cache_prompt": True, "return_tokens": True, "stream": True, "repeat_penalty": 1.0,
            "return_progress": True,  # tells what was in the cache before the text ends
            "response_fields": ["stop", "tokens", "model", "prompt_progress", "timings"],  # 2 kB less at the end
        }  # fmt: skip

    def written(self, event: Any) -> Read:
        if "prompt_progress" in sound(event):  # with a token that is none
            progress = event["prompt_progress"]
            return Read(usage=Usage(count(progress, "total"), count(progress, "cache")))
        if event.get("stop"):  # the last event repeats no token
            usage = _llama_usage(event)
            return Read((), usage, name(event.get("model")), usage.num_written)
        return Read(_llama_rows(event), num_written=count(event, "tokens_predicted"))

    def one(
        self, model: str, token_ids: Seq[int], num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        """Path and body of a request for the next token alone, not as a stream."""
        path, body = self.writing(model, token_ids, 1, num_best, drawn)
        fields = ["tokens", "completion_probabilities", "model", "timings"]
        return path, {**body, "stream": False, "return_progress": False, "response_fields": fields}

    def one_written(self, answer: Any) -> Read:
        rows = _llama_rows(sound(answer))
        if len(rows) != 1:
            raise CloudFailure(f"The server wrote {len(rows)} tokens in place of one.")
        return Read(rows, _llama_usage(answer), name(answer.get("model")))


def _llama_usage(event: Any) -> Usage:
    cached = count(event, "timings", "cache_n")
    return Usage(cached + count(event, "timings", "prompt_n"), cached, count(event, "timings", "predicted_n"))


def _llama_rows(event: Any) -> tuple[Row, ...]:
    token_ids = numbers(field(event, "tokens"))
    listed = event.get("completion_probabilities") or [None] * len(token_ids)
    if len(listed) != len(token_ids):
        raise CloudFailure("The server sent log-probabilities of other tokens.")
    return tuple(Row(token_id, _llama_best(best)) for token_id, best in zip(token_ids, listed, strict=True))


def _sampling(drawn: DecodingParams | None) -> dict[str, Any]:
    if drawn is None:
        return {"temperature": 0}
    return {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k, "min_p": drawn.min_p}


def _llama_best(listed: Any) -> tuple[tuple[int, float], ...]:
    if listed is None:
        return ()
    return tuple(
        (number(field(each, "id")), log_probability(field(each, "logprob"))) for each in field(listed, "top_logprobs")
    )
