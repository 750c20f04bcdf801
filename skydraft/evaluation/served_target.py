"""A target behind an emulated link: a server in a process of its own, and proxies in front of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from skydraft import api
from skydraft.edge.connection import Cloud
from skydraft.engines.options import EngineOptions
from skydraft.errors import CloudFailure
from skydraft.evaluation.emulated_link import EmulatedLink, LinkShape


class ServedTarget:
    """`skydraft serve` on a free port of loopback, for as long as the `with` block lasts."""

    def __init__(self, model: str, options: EngineOptions, execution: str, *, offline: bool) -> None:
        self._command = [
            *(sys.executable, "-m", "skydraft.cli.main", "serve", "--port", "0", "--max-sessions", "2"),
            *("--model", model, "--execution", execution, "--log-level", "error"),
            *("--context", str(options.context_len), "--threads", str(options.num_threads)),
            *("--gpu-layers", str(options.gpu_layers), "--device", options.device, "--dtype", options.dtype),
            *("--quantization", options.quantization),
            *(("--offline",) if offline else ()),
        ]
        self._reader: threading.Thread | None = None

    def __enter__(self) -> ServedTarget:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        try:
            self._port = self._await_port()
        except BaseException:
            self.__exit__()
            raise
        # Read on, so that a full pipe never holds the server up.
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        return self

    def _await_port(self) -> int:
        assert self._process.stderr is not None
        said = []
        for line in self._process.stderr:
            if "sessions of" in line:
                return int(line.split(" (")[0].rpartition(":")[2])
            said.append(line.strip())
        raise CloudFailure(
            f"The server for the emulated link did not start: {said[-1] if said else 'it said nothing'}."
        )

    def _drain(self) -> None:
        assert self._process.stderr is not None
        for _ in self._process.stderr:
            pass

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        if self._reader:
            self._reader.join()
        if self._process.stderr:
            self._process.stderr.close()

    @contextmanager
    def behind(self, rtt_ms: float, kbps: float) -> Iterator[Cloud]:
        """A connection through a link of this round trip, half of it each way."""
        shape = LinkShape(delay_ms=rtt_ms / 2, bandwidth_kbps=kbps)
        with EmulatedLink(("127.0.0.1", self._port), shape) as link:
            cloud = api.connect(link.address, require=True)
            try:
                yield cloud
            finally:
                cloud.close()
