"""What stands before a server and counts: requests, bytes of their bodies, and tokens, as a reader of the bill would.

    with Front(server_url) as front:
        front.url, front.posts              # each POST that came, whatever became of it
        front.fates.append("500")           # what the next request that generates gets

It parses HTTP by itself: nothing of skydraft's decides what was sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.stock.fakes import GENERATING

# Counts that a server tells of its cache, in the words of all dialects.
_CACHED = re.compile(rb'"(?:cached_tokens|cache_n|cache)": ?(\d+)')
_DATA = re.compile(rb"^data: ?(\{.*\})\r?$", re.M)


@dataclass
class Post:
    path: str
    body: Any
    num_bytes: int
    told: bytearray = field(default_factory=bytearray)
    was_left: bool = False  # by the client, perhaps before the end of the answer
    was_cut: bool = False  # here

    @property
    def prompt(self) -> Any:
        """Ids, or text."""
        if "messages" in self.body:
            return "".join(each["content"] for each in self.body["messages"])
        return self.body.get("prompt", self.body.get("input_ids"))

    @property
    def num_cached(self) -> int:
        return max((int(found) for found in _CACHED.findall(self.told)), default=0)

    def num_written(self, encode: Any) -> int:
        events = [json.loads(event) for event in _DATA.findall(self.told)]
        if not events:
            body = self.told.partition(b"\r\n\r\n")[2]
            with suppress(ValueError):
                events = [json.loads(body)]
        ids = [len(event["output_ids"]) for event in events if "output_ids" in event]
        total = max(ids, default=0) + sum(len(event.get("tokens") or ()) for event in events)
        if self.path == "/completion":
            total -= sum("prompt_progress" in event for event in events)  # with a token that is none
        for choice in (choice for event in events for choice in event.get("choices", ())):
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            total += len(choice["token_ids"]) if choice.get("token_ids") else len(encode(text))
        return total


class Front:
    """It listens on a port of its own and passes requests on. `fates` are those of the next that generate: a status,
    "hangs up", "hangs up S" seconds later, "silent", "says BODY", "keeps" the whole answer, or "cut N" after N bytes of
    it; then, and with "", all is well."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self.posts: list[Post] = []
        self.fates: deque[str] = deque()
        self.num_open = 0  # connections
        self._loop = asyncio.new_event_loop()
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_up.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def generating(self) -> list[Post]:
        return [post for post in self.posts if post.path in GENERATING]

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._is_up.set()
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0.05))  # what is being accepted
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        post: Post | None = None
        begun = bytearray()  # of the next request, before the front had seen the end of the answer
        self.num_open += 1
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                try:
                    head = bytes(begun) + await reader.readuntil(b"\r\n\r\n")
                    begun.clear()
                except (OSError, asyncio.IncompleteReadError):
                    if post is not None:  # perhaps without having read all of the last answer
                        post.was_left = True
                    break
                method, path, _ = head.decode().split(" ", 2)
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                fate = self.fates.popleft() if self.fates and path in GENERATING else ""
                body = await reader.readexactly(int(length[1])) if length else b""
                post = Post(path, json.loads(body or b"{}"), len(body))
                if method == "POST":
                    self.posts.append(post)
                if not await self._answer(head + body, post, fate, begun, reader, writer):
                    break
        writer.transport.abort()
        self.num_open -= 1

    async def _answer(
        self, request: bytes, post: Post, fate: str, begun: bytearray, reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        """Answer; returns whether the connection stays."""
        if fate.startswith("hangs up"):
            await asyncio.sleep(float(fate[8:] or 0))
            return False
        if fate == "silent":
            await reader.read()
            return False
        if fate.startswith("says "):
            body = fate[5:].encode()
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return True
        if fate.isdecimal():
            writer.write(b"HTTP/1.1 %s X\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}" % fate.encode())
            return True
        reading = asyncio.ensure_future(reader.read(1))  # nothing, when the client leaves
        passing = asyncio.ensure_future(self._pass(request, post, fate, writer))
        await asyncio.wait((reading, passing), return_when=asyncio.FIRST_COMPLETED)
        if reading.done() and (reading.exception() or not reading.result()):
            post.was_left = True
            passing.cancel()
        (stays,) = await asyncio.gather(passing, return_exceptions=True)
        reading.cancel()
        await asyncio.wait((reading,))
        if not reading.cancelled() and not reading.exception():
            begun += reading.result()
        return stays is True

    async def _pass(self, request: bytes, post: Post, fate: str, writer: asyncio.StreamWriter) -> bool:
        most = int(fate[4:]) if fate.startswith("cut ") else 1 << 60
        up_reader, up_writer = await asyncio.open_connection(self._host, self._port)
        try:
            up_writer.write(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1).replace(b"keep-alive", b"close"))
            head = await up_reader.readuntil(b"\r\n\r\n")
            if fate == "keeps":
                post.told += head + await up_reader.read()
                return False
            writer.write(re.sub(rb"(?i)connection: *close\r\n", b"", head))
            post.told += head
            while data := await up_reader.read(65536):
                part = data[:most]
                most -= len(part)
                post.told += part
                writer.write(part)
                await writer.drain()
                if len(part) < len(data):
                    post.was_cut = True
                    return False
            return True
        finally:
            up_writer.transport.abort()
