"""A target behind an emulated link: a server in a process of its own, and proxies in front of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from skydraft import api
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import EngineOptions
from skydraft.errors import CloudFailure
from skydraft.evaluation.link import EmulatedLink, LinkShape


class ServedTarget:
    """`skydraft serve` on a free port of loopback, for as long as the `with` block lasts."""

    def __init__(self, model: str, options: EngineOptions, execution: str) -> None:
        self._command = [
            *(sys.executable, "-m", "skydraft.cli.main", "serve", "--port", "0", "--max-sessions", "2"),
            *("--model", model, "--execution", execution, "--log-level", "error"),
            *("--context", str(options.context_len), "--threads", str(options.num_threads)),
            *("--gpu-layers", str(options.gpu_layers), "--device", options.device, "--dtype", options.dtype),
        ]

    def __enter__(self) -> ServedTarget:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if "sessions of" not in line:
            raise CloudFailure(f"The server for the emulated link did not start: {line.strip() or 'it said nothing'}.")
        self._port = int(line.split(" (")[0].rpartition(":")[2])
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

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
