"""`llama-server` of llama.cpp, as its own interface takes and gives token ids."""

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
    count,
    field,
    log_probability,
    name,
    number,
    numbers,
    sound,
)
from skydraft.edge.stock.ledger import Usage
from skydraft.edge.stock.wire import Wire
from skydraft.errors import CloudFailure


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
            usage = _usage(event)
            return Read((), usage, name(event.get("model")), usage.num_written)
        return Read(_rows(event), num_written=count(event, "tokens_predicted"))

    def one(
        self, model: str, token_ids: Seq[int], num_best: int, drawn: DecodingParams | None = None
    ) -> tuple[str, Body]:
        """Path and body of a request for the next token alone, not as a stream."""
        path, body = self.writing(model, token_ids, 1, num_best, drawn)
        fields = ["tokens", "completion_probabilities", "model", "timings"]
        return path, {**body, "stream": False, "return_progress": False, "response_fields": fields}

    def one_written(self, answer: Any) -> Read:
        """What its answer says."""
        rows = _rows(sound(answer))
        if len(rows) != 1:
            raise CloudFailure(f"The server wrote {len(rows)} tokens in place of one.")
        return Read(rows, _usage(answer), name(answer.get("model")))


def _usage(event: Any) -> Usage:
    cached = count(event, "timings", "cache_n")
    return Usage(cached + count(event, "timings", "prompt_n"), cached, count(event, "timings", "predicted_n"))


def _rows(event: Any) -> tuple[Row, ...]:
    token_ids = numbers(field(event, "tokens"))
    listed = event.get("completion_probabilities") or [None] * len(token_ids)
    if len(listed) != len(token_ids):
        raise CloudFailure("The server sent log-probabilities of other tokens.")
    return tuple(Row(token_id, _best(best)) for token_id, best in zip(token_ids, listed, strict=True))


def _sampling(drawn: DecodingParams | None) -> dict[str, Any]:
    if drawn is None:
        return {"temperature": 0}
    return {"temperature": drawn.temperature, "top_p": drawn.top_p, "top_k": drawn.top_k, "min_p": drawn.min_p}


def _best(listed: Any) -> tuple[tuple[int, float], ...]:
    if listed is None:
        return ()
    return tuple(
        (number(field(each, "id")), log_probability(field(each, "logprob"))) for each in field(listed, "top_logprobs")
    )
