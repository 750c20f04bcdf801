"""What the dialects share: reading a request, running the model for it, and answering whole or as a stream."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from skydraft.errors import PromptError
from tests.stock.faults import SOUND, Fault
from tests.stock.model import Asked, Model, Sampling, Token


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
