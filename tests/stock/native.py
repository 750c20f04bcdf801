"""Servers with a way of speaking of their own: llama-server, and SGLang's `/generate`."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.stock.answering import Run
from tests.stock.model import Sampling, Token
from tests.stock.openai import Body, Vllm, ids_of


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
