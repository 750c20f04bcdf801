"""A gateway in a process of its own over the toy pair, watched from outside: answers, times and memory."""

import http.client
import re
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..starting import Started
from .running import Running

PATIENCE_S = 60.0
TOYS = ("--edge-model", "toy:drift=0.2", "--cloud-model", "toy")


class Apart:
    """`skydraft gateway` with these options, that may have `limit_mib` of address space."""

    def __init__(self, *options: str, limit_mib: int = 3072) -> None:
        self._process = Started("gateway", *(options or TOYS), "--port", "0", stderr=subprocess.PIPE)
        self.printed = ""
        assert self._process.stderr is not None
        while "Ctrl-C stops." not in self.printed:
            line = self._process.stderr.readline()
            assert line, self.printed
            self.printed += line
        found = re.search(r"https?://localhost:(\d+)", self.printed)
        assert found
        self.port = int(found[1])
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        self.pid = self._process.child()
        resource.prlimit(self.pid, resource.RLIMIT_AS, (limit_mib << 20, limit_mib << 20))

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.printed += line

    def post(self, content: bytes | None, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, bytes]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        try:
            client.request("GET" if content is None else "POST", path, content, headers)
            reply = client.getresponse()
            return reply.status, reply.read()
        finally:
            client.close()

    def health(self) -> int:
        return self.post(None, "/health")[0]

    @contextmanager
    def watched(self) -> Iterator[SimpleNamespace]:
        """Ask for /health every 10 ms. In the end it says the longest wait, in seconds, anything but 200, and how much
        more memory was resident at some time, in MiB."""
        seen, over = SimpleNamespace(worst_s=0.0, wrong=list[int]()), threading.Event()

        def watch() -> None:
            while not over.wait(0.01):
                began = time.monotonic()
                status = self.health()
                seen.wrong += [] if status == 200 else [status]
                seen.worst_s = max(seen.worst_s, time.monotonic() - began)

        before = self._mib("VmRSS")
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(watch)
            try:
                yield seen
            finally:
                over.set()
        watching.result()
        seen.grew_mib = self._mib("VmHWM") - before

    wait_until = staticmethod(Running.wait_until)

    def _mib(self, name: str) -> float:
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        assert found
        return int(found[1]) / 1024

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, float]:
        """Its status and the seconds that it took to end; `printed` is complete then."""
        began = time.monotonic()
        self._process.send_signal(number)
        status = self._process.wait(PATIENCE_S)
        took_s = time.monotonic() - began
        self._reading.join(PATIENCE_S)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return status, took_s


@contextmanager
def apart(*options: str, **limits: Any) -> Iterator[Apart]:
    """A gateway apart; its end is asserted to be clean and without a traceback."""
    running = Apart(*options, **limits)
    try:
        yield running
    finally:
        status, _ = running.stop()
    assert status == 0 and "Traceback" not in running.printed, running.printed[-2000:]
