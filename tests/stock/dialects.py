"""What servers say over HTTP: what each program documents of it, over `Model`.

vLLM 0.32.0 and llama-server (xllamacpp 2026.10) were asked and read; what they answered is held against these by
`tests/stock/test_real.py` where they are installed. SGLang was never run by us: its shapes follow its published
sources, srt/entrypoints/http_server.py and srt/managers/{io_struct,tokenizer_manager}.py.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar, TypeAlias

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.stock.answering import Answering, Refused, Run, Sampling, Token

Body: TypeAlias = dict[str, Any]


def ids_of(given: Any) -> list[int]:
    if not isinstance(given, list) or not given or not all(isinstance(i, int) for i in given):
        raise Refused(400, "prompt must be ids, and not empty")
    return given


class Vllm(Answering):
    """vLLM's OpenAI server. It sends the token that ends a text with the others, and no id unless it is asked to."""

    paths: ClassVar = {"/v1/models": "models", "/tokenize": "tokenize", "/v1/completions": "completions"}
    owner = "vllm"
    tells_more = True  # of its model, and of its cache with --enable-prompt-tokens-details
    salt = "cache_salt"

    async def models(self, request: Request) -> Response:
        card = {"id": self.model.name, "object": "model", "created": 1, "owned_by": self.owner}
        about = {"root": self.model.name, "parent": None, "max_model_len": self.model.engine.context_len}
        return JSONResponse({"object": "list", "data": [card | (about if self.tells_more else {})]})

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        return JSONResponse({"tokens": list(self.model.tokenizer.encode(body["prompt"]))})

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
        run = self.run(request, body, ids_of(body.get("prompt")), body.get("max_tokens", 16), self.sampling_of(body))
        return self.stream(run, self._parts(run), done=True)  # nobody asks for an answer in one piece

    async def steps(self, run: Run) -> AsyncIterator[list[Token]]:
        """The tokens of each event."""
        async for token in run.tokens():
            yield [token]

    async def _parts(self, run: Run) -> AsyncIterator[Body]:
        prompt = {"prompt_token_ids": run.prompt}
        async for step in self.steps(run):
            choice = {"index": 0, "text": "".join(token.text for token in step), "stop_reason": None}
            choice |= {"finish_reason": step[-1].ends or None}
            if run.body.get("return_token_ids"):
                choice |= {"token_ids": [token.id for token in step]} | prompt
            prompt = {"prompt_token_ids": None}
            yield self._answer(run, [choice])
        if (run.body.get("stream_options") or {}).get("include_usage"):
            yield self._answer(run, []) | {"usage": self._usage(run)}

    def _answer(self, run: Run, choices: list[Any]) -> Body:
        return {"id": "x", "object": "text_completion", "created": 1, "model": self.model.name, "choices": choices}

    def _usage(self, run: Run) -> Body:
        num_read, num_written = len(run.prompt), run.asked.num_written
        cached = {"cached_tokens": run.asked.cached} if self.tells_more else None
        total = {"total_tokens": num_read + num_written, "prompt_tokens_details": cached}
        return {"prompt_tokens": num_read, "completion_tokens": num_written, **total}


# What hosts say of fields that a model does not take.
REFUSALS = {
    "max_tokens": (400, "Unsupported parameter: 'max_tokens' is not supported with this model. "
                        "Use 'max_completion_tokens' instead."),
    "temperature": (400, "Unsupported value: 'temperature' does not support it with this model. Only the default (1) "
                         "value is supported."),
    "stream_options": (422, "extra_forbidden: body.stream_options"),
}  # fmt: skip


class OpenAI(Vllm):
    """Chats as hosts document them: text alone, and an end that comes apart from it. Their models do not take the
    fields `refused`. None of these hosts was asked by us."""

    paths: ClassVar = {"/v1/models": "models", "/v1/chat/completions": "chat"}
    owner, tells_more = "system", False
    salt = ""

    def __init__(self, *args: Any, refused: tuple[str, ...] = (), **named: Any) -> None:
        super().__init__(*args, **named)
        self.refused = refused

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
        yield self.part(run, {}, ends) | {"usage": None}
        if (run.body.get("stream_options") or {}).get("include_usage"):
            yield self.part(run, {}) | {"choices": [], "usage": self._usage(run)}


class LlamaServer(Vllm):
    """llama-server (xllamacpp 2026.10): as it answered a Qwen2.5 1.5B, without what nobody reads.

    A stream ends with a part that has no token, and without OpenAI's mark. Tokens that end within a character are not
    told: the part after them has the last token alone, and counts them all.
    """

    paths: ClassVar = {"/props": "props", "/v1/models": "models", "/tokenize": "tokenize",
                       "/completion": "completion"}  # fmt: skip
    owner, tells_more, salt = "llamacpp", False, ""

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(self, request: Request) -> Response:
        name, engine = self.model.name, self.model.engine
        about = {"model_alias": name, "model_path": f"/models/{name}/{engine.name}.gguf"}
        return JSONResponse(about | {"default_generation_settings": {"n_ctx": engine.context_len}})

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        return JSONResponse({"tokens": list(self.model.tokenizer.encode(body["content"]))})

    def _sampled(self, body: Body) -> Sampling:
        named = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": None, "ignore_eos": False}
        given: Any = {name: body.get(name, usual) for name, usual in named.items()}
        given |= {"top_k": max(given["top_k"], 0), "last_n": body.get("repeat_last_n", 64)}
        order = body.get("samplers", ["top_p", "temperature"])
        given |= {"is_late": order.index("temperature") > order.index("top_p")}
        if "json_schema" in body:
            given["grammar"] = f"json_schema:{json.dumps(body['json_schema'])}"
        penalty = body.get("repeat_penalty", self.model.usual["repetition_penalty"])
        return Sampling(**given | self.penalties_of(body) | {"penalty": penalty})

    async def completion(self, request: Request) -> Response:
        body = await self.body(request)
        limit = body.get("n_predict", -1)
        num = 1 << 30 if limit < 0 else max(limit, 1)
        run = self.run(request, body, ids_of(body.get("prompt")), num, self._sampled(body))
        if body.get("stream"):
            return self.stream(run, self._chunks(run), done=False)
        return JSONResponse(self._whole(run, [token async for token in run.tokens()]))

    async def _chunks(self, run: Run) -> AsyncIterator[Body]:
        written: list[Token] = []
        async for token in run.tokens():
            written.append(token)
            if self._is_cut(written):
                continue
            yield {"content": token.text, "tokens": [token.id], "stop": False, "tokens_predicted": len(written)}
        yield self._whole(run, written) | {"content": "", "tokens": []}

    def _is_cut(self, tokens: list[Token]) -> bool:
        """Whether their text ends within a character: a byte that begins one, and too few after it."""
        text = b"".join(self.model.engine.vocab.pieces[token.id] for token in tokens[-4:] if isinstance(token.id, int))
        for num, byte in enumerate(reversed(text[-4:]), 1):
            if byte & 0xC0 != 0x80:
                return num < 2 * (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        return False

    def _whole(self, run: Run, tokens: list[Token]) -> Body:
        num_read, hit = len(run.prompt), run.asked.cached
        answer = {
            "content": "".join(token.text for token in tokens), "stop": True, "model": self.model.name,
            "tokens": [token.id for token in tokens] if run.body.get("return_tokens") else [],
            "timings": {"cache_n": hit, "prompt_n": num_read - hit, "predicted_n": len(tokens)},
        }  # fmt: skip
        return {name: answer[name] for name in run.body.get("response_fields", answer) if name in answer}


class Sglang(Vllm):
    """SGLang's native interface. By its sources (read, never run by us): a stream repeats text and ids from the
    beginning in each part; ids hold the token that ended the text."""

    paths: ClassVar = {"/v1/models": "models", "/tokenize": "tokenize", "/generate": "generate"}
    owner, salt = "sglang", "extra_key"

    async def health(self, request: Request) -> Response:
        await asyncio.sleep(1)
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await self.body(request)
        given = dict(body.get("sampling_params") or {})
        num, top_k = given.get("max_new_tokens", 128), given.get("top_k", -1)
        grammar = next((f"{kind}:{given[kind]}" for kind in ("json_schema", "regex") if given.get(kind)), "")
        how = Sampling(
            temperature=given.get("temperature", 1.0), top_k=max(top_k, 0), top_p=given.get("top_p", 1.0),
            min_p=given.get("min_p", 0.0), ignore_eos=given.get("ignore_eos", False), grammar=grammar,
            min_tokens=given.get("min_new_tokens", 0), **self.penalties_of(given) | {"penalty": 1.0},
        )  # fmt: skip
        run = self.run(request, body, ids_of(body["input_ids"]), num, how)
        return self.stream(run, self._told_again(run), done=True)  # nobody asks for an answer in one piece

    async def _told_again(self, run: Run) -> AsyncIterator[Body]:
        written: list[Token] = []
        async for token in run.tokens():
            written.append(token)
            ids = [token.id for token in written]
            counts = {"prompt_tokens": len(run.prompt), "completion_tokens": len(ids)}
            meta = counts | {"cached_tokens": run.asked.cached}
            yield {"text": "".join(token.text for token in written), "output_ids": ids, "meta_info": meta}
