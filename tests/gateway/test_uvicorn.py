"""What the gateway uses of uvicorn beyond its documentation: these names must be there, and mean what they meant.

pyproject.toml bounds uvicorn's version by the newest one with which this passed.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

SERVER = ("config", "server_state", "servers", "started", "should_exit", "startup", "shutdown", "handle_exit", "run")
CALLED = ("connection_made", "data_received", "connection_lost", "pause_writing", "resume_writing",
          "timeout_keep_alive_handler")  # fmt: skip


async def nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application that does not answer."""


def config() -> uvicorn.Config:
    made = uvicorn.Config(nothing, ws="none", lifespan="off", log_config=None, timeout_keep_alive=30)
    made.load()
    return made


def test_a_server_has_what_is_overridden_and_read() -> None:
    server = uvicorn.Server(config())
    server.servers = []
    assert not [name for name in SERVER if not hasattr(server, name)]
    assert (server.started, server.should_exit, server.server_state.connections) == (False, False, set())
    assert server.config.ssl is None
    for method in (server.startup, server.shutdown):
        assert inspect.iscoroutinefunction(method) and list(inspect.signature(method).parameters) == ["sockets"]
    server.handle_exit(15, None)
    assert server.should_exit


def test_a_protocol_tells_of_its_request_and_its_timer() -> None:
    class Transport(asyncio.Transport):
        def is_closing(self) -> bool:
            return False

        def pause_reading(self) -> None:
            """Not of interest."""

        close = pause_reading

    async def seen() -> None:
        state = ServerState()
        protocol = H11Protocol(config=config(), server_state=state, app_state={})
        assert protocol.cycle is None and protocol.loop is asyncio.get_running_loop()
        assert not [name for name in CALLED if not callable(getattr(protocol, name))]
        protocol.connection_made(transport := Transport())
        assert protocol.transport is transport and state.connections == {protocol}
        assert protocol.timeout_keep_alive == 30 and protocol.timeout_keep_alive_task is None
        protocol.data_received(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab")
        cycle: Any = protocol.cycle
        assert (cycle.more_body, bytes(cycle.body), cycle.response_complete) == (True, b"ab", False)
        before = cycle
        protocol.data_received(b"cde")
        assert protocol.cycle is before and (cycle.more_body, bytes(cycle.body)) == (False, b"abcde")
        protocol.connection_lost(None)
        assert not state.connections

    asyncio.run(seen())
