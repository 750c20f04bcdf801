"""A server in this process, on a free port of loopback, for tests of what lies between edge and cloud."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from skydraft.cloud.limits import Limits
from skydraft.cloud.server import CloudServer, ServeOptions
from skydraft.engines.base import Engine


class Serving:
    """A running CloudServer with its own thread and event loop."""

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self.server = CloudServer(engine, options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stopped = False
        try:
            self.port: int = self._run(self.server.start())
        except BaseException:
            self._end_loop()
            raise
        self.address = f"127.0.0.1:{self.port}"

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def stop(self, grace_s: float = 0.0) -> None:
        if not self._stopped:
            self._stopped = True
            self._run(self.server.stop(grace_s))
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    @staticmethod
    def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Return when the condition holds; fail if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "this did not come true"
            time.sleep(0.01)

    def forget_sessions(self, *, keep_verdicts: bool) -> None:
        """Close all sessions, as evictions or a restart would. Finished ones, kept for replays, stay if wanted."""
        done = threading.Event()

        def forget() -> None:
            for number, session in list(self.sessions._table.items()):
                if session.target.sequence is not None or not keep_verdicts:
                    self.sessions.close(number)
            done.set()

        self.worker._inbox.put(forget)
        assert done.wait(5)

    @property
    def worker(self) -> Any:
        return self.server._worker

    @property
    def sessions(self) -> Any:
        return self.worker._sessions


@contextmanager
def serving(engine: Engine, *, port: int = 0, **options: Any) -> Iterator[Serving]:
    """Serve an engine; `options` are those of ServeOptions, and of Limits where their names are."""
    names = set(Limits.__dataclass_fields__)
    limits = Limits(**{name: options.pop(name) for name in names & options.keys()})
    running = Serving(engine, ServeOptions(port=port, limits=limits, **options))
    try:
        yield running
    finally:
        running.stop()
