"""How servers speak of the same thing: what each program documents of its HTTP, over `Model`.

vLLM 0.32.0 and llama-server (xllamacpp 2026.10) were asked and read; what they answered is held against these by
`tests/stock/test_real.py` where they are installed. SGLang was never run by us: its shapes follow its published
sources, srt/entrypoints/http_server.py and srt/managers/{io_struct,tokenizer_manager}.py.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.stock.answering import Answering, Refused, Run
from tests.stock.model import Sampling, Token

Body: TypeAlias = dict[str, Any]
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


def ids_of(given: Any) -> list[int]:
    if not isinstance(given, list) or not given or not all(isinstance(i, int) for i in given):
        raise Refused(400, "prompt must be ids, and not empty")
    return given


class Vllm(Answering):
    """vLLM's OpenAI server. It sends the token that ends a text with the others, and no id unless it is asked to."""

    paths: ClassVar = {"/v1/models": "models", "/tokenize": "tokenize", "/v1/completions": "completions"}
    has_ids = True
    salt = "cache_salt"

    def error(self, refused: Refused) -> Body:
        kind = {404: "NotFoundError"}.get(refused.status, "BadRequestError")
        return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.status}}

    async def models(self, request: Request) -> Response:
        model = self.model
        card = {"id": model.name, "object": "model", "created": 1, "owned_by": "vllm", "root": model.name}
        card |= {"parent": None, "max_model_len": model.engine.context_len} if self.has_ids else {}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        return JSONResponse({"tokens": list(self.model.tokenizer.encode(body["prompt"]))})

    def prompt_of(self, body: Body) -> list[int]:
        given = body.get("prompt")
        return list(self.model.tokenizer.encode(given)) if isinstance(given, str) else ids_of(given)

    def sampling_of(self, body: Body) -> Sampling:
        named = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "seed": None, "ignore_eos": False, "min_tokens": 0}
        given: Any = {name: body.get(name, usual) for name, usual in named.items()}
        for kind, content in (body.get("structured_outputs") or {}).items():
            given["grammar"] = f"{ {'json': 'json_schema', 'grammar': 'lark'}.get(kind, kind) }:{content}"
        return Sampling(top_k=max(body.get("top_k", 0), 0), **given, **self.penalties_of(body))

    def penalties_of(self, body: Body) -> Body:
        """Clamped, as vLLM does it; the names of all but llama-server."""
        usual = {name: body.get(name, value) for name, value in self.model.usual.items()}
        bias = tuple((int(i), min(max(x, -100.0), 100.0)) for i, x in (body.get("logit_bias") or {}).items())
        how = {"bias": bias, "penalty": usual["repetition_penalty"], "presence": usual["presence_penalty"]}
        return how | {"frequency": body.get("frequency_penalty", 0.0)}

    async def completions(self, request: Request) -> Response:
        body = await self.body(request)
        if body.get("model", self.model.name) != self.model.name:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        run = self.run(request, body, self.prompt_of(body), body.get("max_tokens", 16), self.sampling_of(body))
        if body.get("stream"):
            return self.stream(run, self._parts(run), done=True)
        if "stream_options" in body:
            raise Refused(400, "Stream options can only be defined when `stream=True`.")
        (choice,) = [self._choice(run, token) async for token in run.tokens()]
        return JSONResponse(self._answer(run, [choice]) | {"usage": self._usage(run)})

    def _tells_ids(self, body: Body) -> bool:
        return bool(body.get("return_token_ids")) and self.has_ids

    async def _parts(self, run: Run) -> AsyncIterator[Body]:
        asks, is_first = run.body.get("stream_options") or {}, True
        async for token in run.tokens():
            choice = self._choice(run, token)
            if self._tells_ids(run.body):
                choice["prompt_token_ids"] = run.prompt if is_first else None
            is_first = False
            yield self._answer(run, [choice])
        if asks.get("include_usage"):
            yield self._answer(run, []) | {"usage": self._usage(run)}

    def _answer(self, run: Run, choices: list[Any]) -> Body:
        return {"id": f"cmpl-{run.number}", "object": "text_completion", "created": int(time.time()),
                "model": self.model.name, "choices": choices}  # fmt: skip

    def _choice(self, run: Run, token: Token) -> Body:
        choice: Body = {"index": 0, "text": token.text, "finish_reason": token.ends or None, "stop_reason": None}
        return choice | ({"token_ids": [token.id]} if self._tells_ids(run.body) else {})

    def _usage(self, run: Run) -> Body:
        num_read, num_written = len(run.prompt), run.asked.num_written
        usage: Body = {"prompt_tokens": num_read, "completion_tokens": num_written,
                       "total_tokens": num_read + num_written}  # fmt: skip
        # Only with --enable-prompt-tokens-details.
        usage["prompt_tokens_details"] = {"cached_tokens": run.asked.cached} if self.has_ids else None
        return usage


# What hosts say of fields that a model does not take.
REFUSALS = {
    "max_tokens": (400, "Unsupported parameter: 'max_tokens' is not supported with this model. "
                        "Use 'max_completion_tokens' instead."),
    "temperature": (400, "Unsupported value: 'temperature' does not support it with this model. Only the default (1) "
                         "value is supported."),
    "stream_options": (422, "extra_forbidden: body.stream_options"),
}  # fmt: skip


class OpenAI(Vllm):
    """Chats as hosts document them: text alone, and an end that comes apart from it. `owner` is of its models, which do
    not take the fields `refused`. None of these hosts was asked by us."""

    paths: ClassVar = {"/v1/models": "models", "/v1/chat/completions": "chat"}
    has_ids = False
    salt = ""

    def __init__(self, *args: Any, owner: str = "system", refused: tuple[str, ...] = (), **named: Any) -> None:
        super().__init__(*args, **named)
        self.owner, self.refused = owner, refused

    async def models(self, request: Request) -> Response:
        card = {"id": self.model.name, "object": "model", "created": 1, "owned_by": self.owner}
        return JSONResponse({"object": "list", "data": [card]})

    async def chat(self, request: Request) -> Response:
        body = await self.body(request)
        for field in self.refused:
            if field in body:
                raise Refused(*REFUSALS[field])
        limit = body.get("max_completion_tokens", body.get("max_tokens", 16))
        said = "".join(message["content"] for message in body["messages"])  # the toy's template
        how = self.sampling_of({"temperature": 0} | body)
        run = self.run(request, body, list(self.model.tokenizer.encode(said)), limit, how)
        return self.stream(run, self.deltas(run), done=True)

    def part(self, run: Run, delta: Body, ends: str | None = None) -> Body:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ends}
        return self._answer(run, [choice]) | {"object": "chat.completion.chunk"}

    async def deltas(self, run: Run) -> AsyncIterator[Body]:
        yield self.part(run, {"role": "assistant", "content": "", "refusal": None}) | {"usage": None}
        ends = ""
        async for token in run.tokens():
            ends = token.ends
            if token.text:
                yield self.part(run, {"content": token.text}) | {"usage": None}
        for last in self.ending(run, ends):
            yield last

    def ending(self, run: Run, ends: str) -> list[Body]:
        last = self.part(run, {}, ends) | {"usage": None}
        asks = (run.body.get("stream_options") or {}).get("include_usage")
        return [last, *([self.part(run, {}) | {"choices": [], "usage": self._usage(run)}] if asks else [])]
