"""What the dialects share: a toy engine that writes and a memory of what it was asked; reading a request, running the
model for it, and answering whole or as a stream."""

import asyncio
import codecs
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skydraft.choosing.grammar import GrammarAlong, compile_grammar, masked
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab, num_shared
from skydraft.errors import PromptError
from tests.stock.faults import SOUND, Fault


@dataclass(frozen=True)
class Sampling:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    bias: tuple[tuple[int, float], ...] = ()
    penalty: float = 1.0
    presence: float = 0.0  # this and the next of the tokens that were written, without the prompt
    frequency: float = 0.0
    last_n: int | None = None  # llama-server: all three of so many last tokens
    min_tokens: int = 0
    grammar: str = ""
    is_late: bool = False  # the temperature comes after all that leaves tokens out

    def edited(self, row: npt.NDArray[Any], ids: list[int], written: list[int], vocab: Vocab) -> npt.NDArray[Any]:
        """Logits as they are chosen from."""
        row = row.copy()
        for token_id, bias in self.bias:
            row[token_id] += bias
        seen = ids if self.last_n is None else ids[-self.last_n :]
        last = [*{*seen}]
        row[last] = np.where(row[last] > 0, row[last] / self.penalty, row[last] * self.penalty)
        counts = Counter(written if self.last_n is None else seen)
        row[[*counts]] -= self.presence + self.frequency * np.array([*counts.values()])
        if len(written) < self.min_tokens:
            row[[*vocab.end_ids]] = -np.inf
        return row

    def chances(self, row: npt.NDArray[Any]) -> dict[int, float]:
        if self.temperature == 0:
            return {int(row.argmax()): 1.0}
        logs = log_softmax(row / (1 if self.is_late else self.temperature))
        order = np.argsort(-logs, kind="stable")[: self.top_k or None]
        order = order[np.exp(logs[order] - logs[order[0]]) >= self.min_p]
        before = np.cumsum(np.exp(logs[order])) - np.exp(logs[order])
        kept = order[before < self.top_p]
        logs = logs[kept] / (self.temperature if self.is_late else 1)
        return dict(zip(kept.tolist(), (np.exp(logs) / np.exp(logs).sum()).tolist(), strict=True))

    def pick(self, row: npt.NDArray[Any], noise: np.random.Generator) -> int:
        chances = self.chances(row)
        return int(noise.choice(list(chances), p=list(chances.values())))


def log_softmax(row: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    row = row - row.max()
    logs: npt.NDArray[np.float64] = row - np.log(np.exp(row).sum())
    return logs


@dataclass(frozen=True)
class Token:
    """One that was written: its text as far as its characters are whole, and why the text ends with it ("", "stop" or
    "length")."""

    id: Any  # an int, unless the server lies
    text: str
    ends: str


@dataclass
class Asked:
    """One request, and what came of it so far. `prompts` is one prompt at most, of which `cached` tokens were in the
    cache."""

    path: str
    body: Any
    came: bytes = b""  # the bytes of its body
    is_sound: bool = True  # it is answered as it should be
    prompts: list[list[int]] = field(default_factory=list)
    cached: int = 0
    salt: str = ""  # what is cached under another one is not found
    num_written: int = 0


class Model:
    """A toy engine behind a server. `tokenizer` is what it makes of texts. Its cache holds the last 500 texts; a hit is
    a whole number of blocks and leaves at least one token to compute."""

    def __init__(self, engine: Engine, name: str = "toy", *, block_len: int = 1) -> None:
        self.engine, self.name, self.block_len = engine, name, block_len
        self.tokenizer: Vocab = engine.vocab
        self.asked: list[Asked] = []
        self.usual = {"repetition_penalty": 1.0, "presence_penalty": 0.0}  # what it was started with
        self._texts: deque[tuple[str, list[int]]] = deque(maxlen=500)

    @property
    def num_written(self) -> int:
        return sum(asked.num_written for asked in self.asked)

    def cached_len(self, prompt: list[int], salt: str = "") -> int:
        asked = np.array(prompt, np.int32)
        known = max((num_shared(asked, np.array(text, np.int32)) for of, text in self._texts if of == salt), default=0)
        return min(known, len(prompt) - 1) // self.block_len * self.block_len

    def admit(self, asked: Asked, prompt: list[int]) -> None:
        asked.prompts, asked.cached = [prompt], self.cached_len(prompt, asked.salt)

    def write(self, asked: Asked, prompt: list[int], num: int, how: Sampling) -> Iterator[Token]:
        noise = np.random.default_rng(len(self.asked) if how.seed is None else how.seed)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        ids, vocab = list(prompt), self.engine.vocab
        along = GrammarAlong(compile_grammar(how.grammar, vocab), vocab, len(prompt)) if how.grammar else None
        self._texts.append((asked.salt, ids))
        sequence = self.engine.open(prompt)
        try:
            for index in range(num):
                row = self.engine.extend_batch([(sequence, ids[-1:])])[0][0].copy()
                edited = how.edited(row.astype(np.float64), ids, ids[len(prompt) :], vocab)
                edited = masked(edited, along.allowed(np.array(ids, np.int32))) if along else edited
                token_id = how.pick(edited, noise)
                ids.append(token_id)
                asked.num_written += 1
                is_end = token_id in vocab.end_ids and not how.ignore_eos
                ends = "stop" if is_end else "length" if index + 1 == num else ""
                text = decoder.decode(vocab.pieces[token_id], final=bool(ends))
                yield Token(token_id, text, ends)
                if is_end:
                    return
        finally:
            sequence.close()


class Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Run:
    model: Model
    asked: Asked
    body: Any
    prompt: list[int]
    num: int
    how: Sampling
    fault: Fault
    token_s: float

    async def tokens(self) -> AsyncIterator[Token]:
        num = 1 << 30 if self.fault.is_endless else self.num
        how = replace(self.how, ignore_eos=self.how.ignore_eos or self.fault.is_endless)
        await asyncio.sleep(self.token_s)
        for token in self.model.write(self.asked, self.prompt, num, how):
            yield replace(token, id=self.fault.token(token.id))
            await asyncio.sleep(self.token_s)


class Answering:
    """A dialect. `paths` are the methods behind the paths; a token takes `token_s` seconds."""

    paths: ClassVar[dict[str, str]] = {}
    salt = ""  # the field that keeps caches apart

    def __init__(self, model: Model, *, token_s: float = 0.0) -> None:
        self.model, self.token_s = model, token_s

    def routes(self) -> list[Route]:
        paths = {"/health": "health"} | self.paths
        return [Route(path, self.guarded(name), methods=["GET", "POST"]) for path, name in paths.items()]

    def guarded(self, name: str) -> Any:
        async def answer(request: Request) -> Response:
            try:
                return await getattr(self, name)(request)  # type: ignore[no-any-return]
            except Refused as refused:
                error = {"message": str(refused), "type": "x", "code": refused.status}
                return JSONResponse({"error": error}, refused.status)

        return answer

    async def health(self, request: Request) -> Response:
        return Response()

    async def body(self, request: Request) -> Any:
        request.scope["asked"].body = given = json.loads(await request.body())
        return given

    def run(self, request: Request, body: Any, prompt: list[int], num: int, how: Sampling) -> Run:
        asked, engine = request.scope["asked"], self.model.engine
        asked.salt = body.get(self.salt, "") if self.salt else ""
        if asked.salt == "" and self.salt in body:
            raise Refused(400, "Parameter 'cache_salt' must be a non-empty string if provided.")
        if min(prompt, default=-1) < 0 or max(prompt) >= engine.vocab.size:
            raise Refused(400, "Prompt contains invalid tokens")
        try:
            engine.check_prompt(prompt)
        except PromptError as error:
            raise Refused(400, str(error)) from error
        num = min(num, engine.context_len - len(prompt))
        self.model.admit(asked, prompt)
        fault = request.scope.get("fault", SOUND)
        return Run(self.model, asked, body, prompt, num, how, fault, self.token_s)

    def stream(self, run: Run, parts: AsyncIterator[Any], *, done: bool) -> Response:
        async def events() -> AsyncIterator[bytes]:
            async for part in parts:
                yield b"data: " + json.dumps(part, ensure_ascii=False).encode() + b"\n\n"
            if done:
                yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")
