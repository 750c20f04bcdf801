"""Servers with a way of speaking of their own: llama-server, and SGLang's `/generate`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.stock.answering import Answering, Refused, Run
from tests.stock.model import Sampling, Token
from tests.stock.openai import Body, Vllm, ids_of


class LlamaServer(Vllm):
    """llama-server (xllamacpp 2026.10): as it answered a Qwen2.5 1.5B, without what nobody reads.

    A stream ends with a part that has no token, and without OpenAI's mark. Tokens that end within a character are not
    told: the part after them has the last token alone, and counts them all. `tokens_cached` is what the slot holds in
    the end; the hit is `timings.cache_n`. Chat goes on from an assistant's last message by itself; a whole answer says
    that again, a stream does not.
    """

    paths: ClassVar = {"/props": "props", "/v1/models": "models", "/tokenize": "tokenize", "/detokenize": "detokenize",
                       "/completion": "completion", "/v1/chat/completions": "chat"}  # fmt: skip
    continues = "always"
    echoes = True

    def error(self, refused: Refused) -> Body:
        kind = {404: "not_found_error", 503: "unavailable_error"}.get(refused.status, "invalid_request_error")
        return {"error": {"code": refused.status, "message": str(refused), "type": kind}}

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(self, request: Request) -> Response:
        model = self.model
        sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "n_predict": -1}
        return JSONResponse(
            {
                "default_generation_settings": {"params": sampling, "n_ctx": model.engine.context_len},
                "total_slots": 4, "model_alias": model.name, "model_path": f"/models/{model.name}.gguf",
                "chat_template": model.engine.vocab.chat_template, "bos_token": "", "eos_token": "<eos>",
                "build_info": "b0-unknown",
            }
        )  # fmt: skip

    async def models(self, request: Request) -> Response:
        vocab, context_len = self.model.engine.vocab, self.model.engine.context_len
        meta = {"vocab_type": 2, "n_vocab": vocab.size, "n_ctx": context_len, "n_ctx_train": context_len}
        card = {"id": self.model.name, "object": "model", "created": 1, "owned_by": "llamacpp", "meta": meta}
        return JSONResponse({"object": "list", "data": [card]})

    async def tokenize(self, request: Request) -> Response:
        body, vocab = await self.body(request), self.model.tokenizer
        tokens = vocab.encode(body["content"])
        if body.get("with_pieces"):
            return JSONResponse({"tokens": [{"id": i, "piece": vocab.written([i])} for i in tokens]})
        return JSONResponse({"tokens": list(tokens)})

    async def detokenize(self, request: Request) -> Response:
        body = await self.body(request)
        return JSONResponse({"content": self.model.tokenizer.written(body["tokens"])})

    def _sampled(self, body: Body) -> Sampling:
        named = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "ignore_eos": False}
        given: Any = {name: body.get(name, usual) for name, usual in named.items()}
        seed = None if body.get("seed", -1) in (-1, 2**32 - 1) else body["seed"]
        return Sampling(
            repetition=body.get("repeat_penalty", 1.0), presence=body.get("presence_penalty", 0.0),
            frequency=body.get("frequency_penalty", 0.0), window=body.get("repeat_last_n", 64), of_prompt=True,
            seed=seed, **given,
        )  # fmt: skip

    async def completion(self, request: Request) -> Response:
        body = await self.body(request)
        given = body["prompt"]
        prompts = [list(self.model.tokenizer.encode(given))] if isinstance(given, str) else ids_of(given)
        limit = body.get("n_predict", -1)
        run = self.run(request, body, prompts, 1 << 30 if limit < 0 else max(limit, 1), self._sampled(body))
        if body.get("stream"):
            return self.stream(run, self._chunks(run), done=False)
        written: list[list[Token]] = [[] for _ in prompts]
        async for index, tokens in run.tokens():
            written[index] += tokens
        several = [self._whole(run, index, tokens) for index, tokens in enumerate(written)]
        answers = run.fault.answers(several)
        return JSONResponse(answers if isinstance(given, list) and isinstance(given[0], list) else answers[0])

    async def _chunks(self, run: Run) -> AsyncIterator[Body]:
        num_read = len(run.prompts[0])
        written: list[list[Token]] = [[] for _ in run.prompts]
        async for index, tokens in run.tokens():
            for token in tokens:  # one a part, whatever came at once
                written[index].append(token)
                if self._is_cut(written[index]):
                    continue
                part = {"index": index, "content": token.text, "tokens": [token.id], "stop": False, "id_slot": -1}
                part |= {"tokens_predicted": len(written[index]), "tokens_evaluated": num_read}
                yield part | self._probabilities(run, [token])
            if tokens[-1].ends:
                yield self._whole(run, index, written[index]) | {"content": "", "tokens": []}

    def _is_cut(self, tokens: list[Token]) -> bool:
        """Whether their text ends within a character: a byte that begins one, and too few after it."""
        text = b"".join(
            self.model.engine.vocab.token_bytes(token.id) for token in tokens[-4:] if isinstance(token.id, int)
        )
        for num, byte in enumerate(reversed(text[-4:]), 1):
            if byte & 0xC0 != 0x80:
                return num < 2 * (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        return False

    def _whole(self, run: Run, index: int, tokens: list[Token]) -> Body:
        num_read, hit = len(run.prompts[index]), run.asked.cached[index]
        ends = {"stop": "eos", "length": "limit", "": "none"}[tokens[-1].ends]
        timings = {"cache_n": hit, "prompt_n": num_read - hit, "prompt_ms": 1.0 * (num_read - hit),
                   "predicted_n": len(tokens), "predicted_ms": 1.0 * len(tokens)}  # fmt: skip
        answer = {
            "index": index, "content": "".join(token.text for token in tokens), "id_slot": index, "stop": True,
            "tokens": [token.id for token in tokens] if run.body.get("return_tokens") else [],
            "model": self.model.name, "tokens_predicted": len(tokens), "tokens_evaluated": num_read,
            "stop_type": ends, "stopping_word": "", "truncated": False, "timings": timings,
            "tokens_cached": num_read + len(tokens) - 1,
        }  # fmt: skip
        if not run.body.get("stream"):
            answer |= self._probabilities(run, tokens)
        if fields := run.body.get("response_fields"):
            flat = answer | {f"timings/{name}": value for name, value in timings.items()}
            return {name: flat[name] for name in fields if name in flat}
        return answer

    def _probabilities(self, run: Run, tokens: list[Token]) -> Body:
        """Raw ones at temperature 1, before any sampling; after it, at most top_k of them."""
        num = run.body.get("n_probs", 0)
        if not num:
            return {}
        after = run.body.get("post_sampling_probs")
        return {"completion_probabilities": [self._chances(run, token, num, after) for token in tokens]}

    def _chances(self, run: Run, token: Token, num: int, after: bool) -> Body:
        def entry(token_id: int, chance: float) -> Body:
            piece = self.model.engine.vocab.written([token_id])
            named = {"id": token_id, "token": piece, "bytes": list(piece.encode())}
            return named | {"prob" if after else "logprob": chance}

        own = float(token.logs[token.id]) if token.id in range(len(token.logs)) else 0.0
        if not after:
            return entry(token.id, own) | {"top_logprobs": [entry(i, lp) for i, lp in token.best(num)]}
        chances = run.how.chances(token.logs)
        best = sorted(chances.items(), key=lambda pair: -pair[1])[:num]
        return entry(token.id, chances.get(token.id, 0.0)) | {"top_probs": [entry(i, p) for i, p in best]}


class Sglang(Answering):
    """SGLang's native interface. By its sources (read, never run by us): a stream repeats text and ids from the
    beginning in each part unless the server has --incremental-streaming-output; ids hold the token that ended the text;
    an input's log-probabilities begin with one of None at place 0; a cache hit ends where log-probabilities begin."""

    paths: ClassVar = {"/get_model_info": "model_info", "/get_server_info": "server_info", "/v1/models": "models",
                       "/tokenize": "tokenize", "/generate": "generate"}  # fmt: skip
    is_incremental = False
    salt = "extra_key"

    async def health(self, request: Request) -> Response:
        """It has a token generated, and looks once a second whether it has come."""
        await asyncio.sleep(1)
        return Response()

    async def model_info(self, request: Request) -> Response:
        path = f"/models/{self.model.name}"
        return JSONResponse({"model_path": path, "tokenizer_path": path, "is_generation": True,
                             "preferred_sampling_params": None, "weight_version": "default"})  # fmt: skip

    async def server_info(self, request: Request) -> Response:
        context_len, path = self.model.engine.context_len, f"/models/{self.model.name}"
        return JSONResponse({"model_path": path, "served_model_name": self.model.name, "context_length": None,
                             "max_total_num_tokens": 100_000, "max_req_input_len": context_len - 6,
                             "disable_radix_cache": False, "internal_states": [{}], "version": "0.5.23"})  # fmt: skip

    async def models(self, request: Request) -> Response:
        name = self.model.name
        card = {"id": name, "object": "model", "created": 1, "owned_by": "sglang", "root": name}
        return JSONResponse({"object": "list", "data": [card | {"max_model_len": self.model.engine.context_len}]})

    async def tokenize(self, request: Request) -> Response:
        body = await self.body(request)
        tokens = list(self.model.tokenizer.encode(body["prompt"]))
        max_len = self.model.engine.context_len
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": max_len})

    async def generate(self, request: Request) -> Response:
        body = await self.body(request)
        prompts = ids_of(body["input_ids"])
        given = dict(body.get("sampling_params") or {})
        num, top_k = given.pop("max_new_tokens", 128), given.pop("top_k", -1)
        how = Sampling(
            temperature=given.get("temperature", 1.0), top_k=max(top_k, 0), top_p=given.get("top_p", 1.0),
            min_p=given.get("min_p", 0.0), repetition=given.get("repetition_penalty", 1.0),
            presence=given.get("presence_penalty", 0.0), frequency=given.get("frequency_penalty", 0.0),
            ignore_eos=given.get("ignore_eos", False),
        )  # fmt: skip
        run = self.run(request, body, prompts, num, how)
        start = body.get("logprob_start_len", -1)
        if body.get("return_logprob") and start >= 0:
            run.asked.cached = [min(hit, start) for hit in run.asked.cached]
        if body.get("stream"):
            return self.stream(run, self._chunks(run), done=True)
        written: list[list[Token]] = [[] for _ in prompts]
        async for index, tokens in run.tokens():
            written[index] += tokens
        answers = run.fault.answers([self._answer(run, index, tokens) for index, tokens in enumerate(written)])
        return JSONResponse(answers if isinstance(body["input_ids"][0], list) else answers[0])

    async def _chunks(self, run: Run) -> AsyncIterator[Body]:
        written: list[list[Token]] = [[] for _ in run.prompts]
        async for index, tokens in run.tokens():
            written[index] += tokens
            part = self._answer(run, index, written[index])
            if self.is_incremental:
                part |= {"text": "".join(token.text for token in tokens), "output_ids": [token.id for token in tokens]}
            yield part | ({"index": index} if isinstance(run.body["input_ids"][0], list) else {})

    def _answer(self, run: Run, index: int, tokens: list[Token]) -> Body:
        ids = [token.id for token in tokens]
        reasons = {"stop": {"type": "stop", "matched": ids[-1]}, "length": {"type": "length", "length": run.num}}
        meta: Body = {"id": str(run.number), "finish_reason": reasons.get(tokens[-1].ends),
                      "prompt_tokens": len(run.prompts[index]), "weight_version": "default"}  # fmt: skip
        if run.body.get("return_logprob"):
            meta |= self._logprobs(run, index, tokens)
        meta |= {"completion_tokens": len(ids), "cached_tokens": run.asked.cached[index]}
        return {"text": "".join(token.text for token in tokens), "output_ids": ids, "meta_info": meta}

    def _logprobs(self, run: Run, index: int, tokens: list[Token]) -> Body:
        num, prompt = run.body.get("top_logprobs_num", 0), run.prompts[index]
        start = run.body.get("logprob_start_len", -1)
        rows = self.model.score(prompt, start) if start >= 0 else []
        read: list[Any] = [
            [None if row is None else float(row[i]), i, None] for row, i in zip(rows, prompt[start:], strict=False)
        ]
        if read:
            read[0][0] = None  # nothing is computed for the first place that is asked for
        meta: Body = {"input_token_logprobs": read, "output_token_logprobs": [
            [float(token.logs[token.id]) if token.id in range(len(token.logs)) else 0.0, token.id, None]
            for token in tokens
        ]}  # fmt: skip
        if num:
            tops = [None if row is None else _best(row, num) for row in rows]
            meta["input_top_logprobs"] = [None, *tops[1:]] if tops else []
            meta["output_top_logprobs"] = [[[lp, i, None] for i, lp in token.best(num)] for token in tokens]
        return meta


def _best(row: Any, num: int) -> list[list[Any]]:
    return [[float(row[i]), int(i), None] for i in (-row).argsort(kind="stable")[:num]]
