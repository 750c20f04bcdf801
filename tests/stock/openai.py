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

    paths: ClassVar = {"/v1/models": "models", "/tokenize": "tokenize",
                       "/v1/completions": "completions", "/v1/chat/completions": "chat"}  # fmt: skip
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
        tokens = list(self.model.tokenizer.encode(body["prompt"]))
        max_len = self.model.engine.context_len
        return JSONResponse({"count": len(tokens), "max_model_len": max_len, "tokens": tokens, "token_strs": None})

    def prompt_of(self, body: Body) -> list[int]:
        given = body.get("prompt")
        return list(self.model.tokenizer.encode(given)) if isinstance(given, str) else ids_of(given)

    def sampling_of(self, body: Body) -> Sampling:
        named = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "seed": None, "ignore_eos": False}
        given: Any = {name: body.get(name, usual) for name, usual in named.items()}
        bias = tuple((int(i), min(max(x, -100.0), 100.0)) for i, x in (body.get("logit_bias") or {}).items())
        allowed = body.get("allowed_token_ids") if self.has_ids else None
        usual = {name: body.get(name, value) for name, value in self.model.usual.items()}
        how = {"bias": bias, "allowed": allowed, "penalty": usual["repetition_penalty"]}
        how["presence"] = usual["presence_penalty"]
        return Sampling(top_k=max(body.get("top_k", 0), 0), **given | how)

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
        num = run.body.get("logprobs")
        logprobs = None if num is None else self._logprobs(run, token, num)
        choice: Body = {"index": 0, "text": token.text, "finish_reason": token.ends or None, "stop_reason": None}
        return choice | {"logprobs": logprobs} | ({"token_ids": [token.id]} if self._tells_ids(run.body) else {})

    def _logprobs(self, run: Run, token: Token, num: int) -> Body:
        as_ids = run.body.get("return_tokens_as_token_ids") and self.has_ids

        def named(token_id: Any) -> str:
            return f"token_id:{token_id}" if as_ids else self.model.engine.vocab.written([token_id])

        own = float(token.logs[token.id]) if token.id in range(len(token.logs)) else 0.0
        top = {named(token.id): own} | {named(i): lp for i, lp in token.best(num)}
        return {"text_offset": [0], "token_logprobs": [own], "tokens": [named(token.id)], "top_logprobs": [top]}

    def _usage(self, run: Run) -> Body:
        num_read, num_written = len(run.prompt), run.asked.num_written
        usage: Body = {"prompt_tokens": num_read, "completion_tokens": num_written,
                       "total_tokens": num_read + num_written}  # fmt: skip
        # Only with --enable-prompt-tokens-details.
        usage["prompt_tokens_details"] = {"cached_tokens": run.asked.cached} if self.has_ids else None
        return usage

    # --- Chat that goes on from the assistant's last message

    continues = "continue_final_message"  # or partial, prefix, extra prefix: what a request says to have that
    echoes = False  # whether a stream begins with what it goes on from

    async def chat(self, request: Request) -> Response:
        body = await self.body(request)
        text, before = self._conversation(body)
        prompt = list(self.model.tokenizer.encode(text))
        run = self.run(request, body, prompt, body.get("max_tokens", 16), self.sampling_of(body))
        return self.stream(run, self._deltas(run, before if self.echoes else ""), done=True)

    async def _deltas(self, run: Run, shown: str) -> AsyncIterator[Body]:
        def part(delta: Body, ends: str | None = None) -> Body:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ends}
            return self._answer(run, [choice]) | {"object": "chat.completion.chunk"}

        yield part({"role": "assistant", "content": shown})
        async for token in run.tokens():
            yield part({"content": token.text}, token.ends or None)
        if (run.body.get("stream_options") or {}).get("include_usage"):
            yield self._answer(run, []) | {"object": "chat.completion.chunk", "usage": self._usage(run)}

    def _conversation(self, body: Body) -> tuple[str, str]:
        """What the model reads, by the toy's template (what was said, in a row), and what it goes on from.

        A last message that is not gone on from is closed with <eos>, and another turn begins.
        """
        messages = body["messages"]
        last = messages[-1]
        said = "".join(message["content"] for message in messages)
        if self.continues == "extra prefix" and "prefix" in body:
            return said + body["prefix"], body["prefix"]
        if last["role"] != "assistant":
            return said, ""
        goes_on = last.get(self.continues) is True
        if self.continues == "continue_final_message":
            goes_on = body.get("continue_final_message") and body.get("add_generation_prompt") is False
        return (said, last["content"]) if goes_on else (said + "<eos>", "")


class Completions(Vllm):
    """OpenAI's completions and chat without any extension: ids may be asked with, and only text comes back."""

    paths: ClassVar = {"/v1/models": "models", "/v1/completions": "completions", "/v1/chat/completions": "chat"}
    has_ids = False
    salt = ""
    continues = "nothing"


class Hosted(Completions):
    """A chat that takes messages alone. `continues` is DashScope's partial, DeepSeek's and Mistral's prefix, or
    SiliconFlow's prefix beside the messages ("extra prefix")."""

    paths: ClassVar = {"/v1/models": "models", "/v1/chat/completions": "chat"}

    def __init__(self, *args: Any, continues: str = "partial", echoes: bool = False, **named: Any) -> None:
        super().__init__(*args, **named)
        self.continues, self.echoes = continues, echoes
