"""Servers that take and give token ids: vLLM (read in 0.32), SGLang (by its published sources, never run by us), and
llama-server of llama.cpp.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from skydraft.edge.stock.dialect import (
    Body,
    Drawing,
    IdDialect,
    Read,
    Row,
    TokenTuple,
    choices,
    count,
    field,
    name,
    number,
    numbers,
    openai_usage,
    rows_of,
    sound,
)
from skydraft.edge.stock.ledger import Usage
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure

_ID = "token_id:"


class Vllm(IdDialect):
    name = "vllm"
    life = "/health"
    salt, separates = "cache_salt", True

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, drawing: Drawing) -> tuple[str, Body]:
        body: dict[str, Any] = {
            "model": model, "prompt": list(token_ids), "max_tokens": num_tokens, **self.sampling(drawing),
            "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "skip_special_tokens": False,  # the edge decides where a text ends
        }  # fmt: skip
        best = {"logprobs": drawing.num_best, "return_tokens_as_token_ids": True} if drawing.num_best else {}
        return "/v1/completions", body | best | _vllm_changes(drawing)

    def written(self, event: Any) -> Read:
        rows = tuple(row for choice in choices(event) for row in _vllm_rows(choice))
        return Read(rows, openai_usage(event), name(event.get("model")))


def _vllm_changes(drawing: Drawing) -> dict[str, Any]:
    """vLLM forbids all tokens but some; a bias goes to 100 there, and does not forbid."""
    changes = drawing.changes
    if changes is None:
        return {}
    may_come = np.isfinite(changes)
    if may_come.sum() * 2 > len(changes):
        return {"logit_bias": {str(token_id): bias for token_id, bias in drawing.biases}}
    shifted = {str(token_id): float(changes[token_id]) for token_id in np.flatnonzero(may_come & (changes != 0))}
    return {"allowed_token_ids": np.flatnonzero(may_come).tolist(), **({"logit_bias": shifted} if shifted else {})}


def _vllm_rows(choice: Any) -> tuple[Row, ...]:
    listed = (choice.get("logprobs") or {}).get("top_logprobs")
    return rows_of(numbers(field(choice, "token_ids") or []), listed, _vllm_best)


def _vllm_best(best: Any) -> Iterator[tuple[int, Any]]:
    for key, value in best.items():
        if not (key.startswith(_ID) and key[len(_ID) :].isdecimal()):
            raise CloudFailure("The server does not name the tokens of its log-probabilities by their ids.")
        yield int(key[len(_ID) :]), value


class Sglang(IdDialect):
    name = "sglang"  # life: its /health writes a token first
    salt, separates = "extra_key", False  # it was ignored until April 2026

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, drawing: Drawing) -> tuple[str, Body]:
        how = {**self.sampling(drawing), "max_new_tokens": num_tokens, "ignore_eos": True}  # the edge ends the text
        if drawing.changes is not None:
            how["logit_bias"] = {str(token_id): bias for token_id, bias in drawing.biases}
        best = {"return_logprob": True, "top_logprobs_num": drawing.num_best} if drawing.num_best else {}
        return "/generate", {"input_ids": list(token_ids), "sampling_params": how, **best, "stream": True}

    def written(self, event: Any) -> Read:
        meta = field(sound(event), "meta_info")
        listed = meta.get("output_top_logprobs")
        rows = rows_of(numbers(field(event, "output_ids")), listed, lambda best: [(each[1], each[0]) for each in best])
        num_written = number(field(meta, "completion_tokens"))
        if num_written < len(rows):
            raise CloudFailure(f"The server sent {len(rows)} tokens, and counts {num_written}.")
        usage = Usage(count(meta, "prompt_tokens"), count(meta, "cached_tokens"), num_written)
        return Read(rows, usage, num_written=num_written)


class LlamaServer(IdDialect):
    """A stream tells a token whose text ends within a character only when the character is whole, and then the last
    token alone. So the tokens before it are asked for one by one, not as a stream."""

    name = "llama-server"
    life = "/health"

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, int]:
        props = await wire.ask("/props", timeout_s)
        path, alias = name(field(props, "model_path")), name(props.get("model_alias"))
        file = path.rpartition("/")[2]
        if model is not None and model not in {each for each in (alias, path, file) if each}:
            return {}
        # Without --alias it is the file's name, or "unknown" in older versions: other files have those too.
        model = path if alias in ("", "unknown", file) else alias
        return {model: count(props, "default_generation_settings", "n_ctx")}

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"content": text, "add_special": False, "parse_special": True}
        return numbers(field(await wire.ask("/tokenize", timeout_s, body), "tokens"))

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, drawing: Drawing) -> tuple[str, Body]:
        changes: dict[str, Any] = {"logit_bias": drawing.biases} if drawing.changes is not None else {}
        if drawing.penalty != 1:
            changes["repeat_last_n"] = len(token_ids) + num_tokens
        return "/completion", {
            "prompt": list(token_ids), "n_predict": num_tokens, "n_probs": drawing.num_best,
            **self.sampling(drawing), **changes, "repeat_penalty": drawing.penalty, "cache_prompt": True,
            "return_tokens": True, "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "stream": True, "return_progress": True,  # tells what was in the cache before the text ends
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

    def one(self, model: str, token_ids: Seq[int], drawing: Drawing) -> tuple[str, Body]:
        path, body = self.writing(model, token_ids, 1, drawing)
        fields = ["tokens", "completion_probabilities", "model", "timings"]
        return path, {**body, "stream": False, "return_progress": False, "response_fields": fields}

    def one_written(self, answer: Any) -> Read:
        return Read(_llama_rows(sound(answer)), _llama_usage(answer), name(answer.get("model")))


def _llama_usage(event: Any) -> Usage:
    cached = count(event, "timings", "cache_n")
    return Usage(cached + count(event, "timings", "prompt_n"), cached, count(event, "timings", "predicted_n"))


def _llama_rows(event: Any) -> tuple[Row, ...]:
    return rows_of(numbers(field(event, "tokens")), event.get("completion_probabilities"), _llama_best)


def _llama_best(listed: Any) -> Iterator[tuple[Any, Any]]:
    return ((field(each, "id"), field(each, "logprob")) for each in listed.get("top_logprobs", ()))
