"""Servers that take and return token ids: vLLM (as of 0.32), SGLang (from its published sources, never run by us), and
llama.cpp's llama-server.
"""

import json
from collections.abc import Sequence as Seq
from typing import Any

from skydraft.config import DecodingParams
from skydraft.edge.stock.dialect import (
    About,
    Body,
    IdDialect,
    Read,
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
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure
from skydraft.grammars import parts
from skydraft.types import LinkCost


def _grammar(params: DecodingParams, **names: str) -> dict[str, str]:
    """Return the grammar under its kind's field name. `names` has the fields whose name is not the kind's."""
    kind, content = parts(params.grammar) if params.grammar else ("", "")
    return {names.get(kind, kind): content} if kind else {}


class Vllm(IdDialect):
    name = "vllm"
    life = "/health"
    salt, separates = "cache_salt", True
    takes_drafts = True
    takes = IdDialect.takes | {"repetition_penalty", "min_new_tokens"}
    grammars = (*IdDialect.grammars, "lark")

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        body: dict[str, Any] = {
            "model": model, "prompt": list(token_ids), "max_tokens": num_tokens, **self.sampling(params),
            "min_tokens": min(params.min_new_tokens, num_tokens), "return_token_ids": True,
            "stream": True, "stream_options": {"include_usage": True},
            "ignore_eos": True, "skip_special_tokens": False,  # the edge ends the text
        }  # fmt: skip
        if grammar := _grammar(params, json_schema="json", lark="grammar"):
            body["structured_outputs"] = grammar
        return "/v1/completions", body

    def written(self, event: Any) -> Read:
        rows = tuple(row for choice in choices(event) for row in rows_of(field(choice, "token_ids") or []))
        return Read(rows, openai_usage(event))


class Sglang(IdDialect):
    name = "sglang"  # keeps the default `life`: its /health generates a token
    salt, separates = "extra_key", False  # older versions than April 2026 ignore it
    takes = IdDialect.takes | {"min_new_tokens"}

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        how = {
            **self.sampling(params), **_grammar(params), "max_new_tokens": num_tokens,
            "min_new_tokens": min(params.min_new_tokens, num_tokens), "ignore_eos": True,  # the edge ends the text
        }  # fmt: skip
        return "/generate", {"input_ids": list(token_ids), "sampling_params": how, "stream": True}

    def written(self, event: Any) -> Read:
        meta = field(sound(event), "meta_info")
        rows = rows_of(field(event, "output_ids"))
        num_written = number(field(meta, "completion_tokens"))
        if num_written < len(rows):
            raise CloudFailure(f"The server sent {len(rows)} tokens but counts {num_written}.")
        num_read, cached = count(meta, "prompt_tokens"), count(meta, "cached_tokens")
        usage = LinkCost(tokens_in=num_read, tokens_hit=cached, tokens_out=num_written)
        return Read(rows, usage, num_written=num_written)


class LlamaServer(IdDialect):
    """llama-server of llama.cpp. If a character has several tokens, its streams send only the last. So `one` requests
    the earlier tokens singly, without a stream."""

    name = "llama-server"
    life = "/health"
    takes = IdDialect.takes | {"repetition_penalty"}
    grammars: tuple[str, ...] = ("json_schema", "json_object")

    async def describe(self, wire: Wire, model: str | None, timeout_s: float) -> dict[str, About]:
        props = await wire.ask("/props", timeout_s)
        path, alias = name(field(sound(props), "model_path")), name(props.get("model_alias"))
        file = path.rpartition("/")[2]
        if model is not None and model not in {each for each in (alias, path, file) if each}:
            return {}
        # Without --alias it is the file's name, or "unknown" in older versions: neither identifies the file.
        model = path if alias in ("", "unknown", file) else alias
        return {model: About(count(props, "default_generation_settings", "n_ctx"), path)}

    async def tokenize(self, wire: Wire, model: str, text: str, timeout_s: float) -> TokenTuple | None:
        body = {"model": model, "content": text, "add_special": False, "parse_special": True}
        return numbers(field(await wire.ask("/tokenize", timeout_s, body), "tokens"))

    def writing(self, model: str, token_ids: Seq[int], num_tokens: int, params: DecodingParams) -> tuple[str, Body]:
        grammar = {kind: json.loads(schema) for kind, schema in _grammar(params).items()}
        return "/completion", {
            "model": model, "prompt": list(token_ids), "n_predict": num_tokens, **self.sampling(params), **grammar,
            "repeat_penalty": params.repetition_penalty, "repeat_last_n": len(token_ids) + num_tokens,
            "cache_prompt": True, "return_tokens": True,
            "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            "stream": True, "return_progress": True,  # reports cached tokens before the text ends
            "response_fields": ["stop", "tokens", "prompt_progress", "timings"],  # saves 2 kB in the last event
        }  # fmt: skip

    def written(self, event: Any) -> Read:
        if "prompt_progress" in sound(event):  # its token is a dummy
            progress = event["prompt_progress"]
            return Read(usage=LinkCost(tokens_in=count(progress, "total"), tokens_hit=count(progress, "cache")))
        if event.get("stop"):  # the last event repeats no token
            usage = _llama_usage(event)
            return Read((), usage, num_written=usage.tokens_out)
        return Read(rows_of(field(event, "tokens")), num_written=count(event, "tokens_predicted"))

    def one(self, model: str, token_ids: Seq[int], params: DecodingParams) -> tuple[str, Body]:
        """Return path and body of a request for the next token, without a stream."""
        path, body = self.writing(model, token_ids, 1, params)
        return path, {**body, "stream": False, "return_progress": False, "response_fields": ["tokens", "timings"]}

    def one_written(self, answer: Any) -> Read:
        return Read(rows_of(field(sound(answer), "tokens")), _llama_usage(answer))


def _llama_usage(event: Any) -> LinkCost:
    cached, num_new, num_written = (count(event, "timings", each) for each in ("cache_n", "prompt_n", "predicted_n"))
    return LinkCost(tokens_in=cached + num_new, tokens_hit=cached, tokens_out=num_written)
