"""A target behind an emulated link: a server in a process of its own, and proxies in front of it."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager

from skydraft import api
from skydraft.edge.cloud import Cloud
from skydraft.engines.options import EngineOptions
from skydraft.errors import CloudFailure
from skydraft.evaluation.emulated_link import EmulatedLink, LinkShape

_PAUSE_S = 0.5


class ServedTarget:
    """`skydraft serve` on a free port of loopback, within a `with` block.

    The port is chosen here, so the server's output need not be parsed.
    """

    def __init__(self, model: str, options: EngineOptions, execution: str, *, offline: bool) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._address: tuple[str, int] = probe.getsockname()
        self._command = [
            *(sys.executable, "-P", "-m", "skydraft.cli.main", "serve", "--port", str(self._address[1])),
            *("--max-sessions", "2", "--model", model, "--execution", execution, "--log-level", "error"),
            *("--context", str(options.context_len), "--threads", str(options.num_threads)),
            *("--gpu-layers", str(options.gpu_layers), "--device", options.device, "--dtype", options.dtype),
            *("--quantization", options.quantization),
            *(("--offline",) if offline else ()),
        ]

    def __enter__(self) -> ServedTarget:
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8")  # not a pipe, which could fill up
        self._process = subprocess.Popen(self._command, stderr=self._said)
        try:
            self._await_start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _await_start(self) -> None:
        """Wait until the server has loaded its model. It listens before. Raises CloudFailure if it ends."""
        with closing(api.connect("{}:{}".format(*self._address))) as cloud:
            while self._process.poll() is None:
                if cloud.facts(_PAUSE_S):
                    return
        self._said.seek(0)
        *_, last = ("it said nothing", *filter(None, map(str.strip, self._said)))
        raise CloudFailure(f"The server for the emulated link did not start: {last.removesuffix('.')}.")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._said.close()

    @contextmanager
    def behind(self, rtt_ms: float) -> Iterator[Cloud]:
        """A connection through a link of this round trip, half of it each way."""
        with EmulatedLink(self._address, LinkShape(delay_ms=rtt_ms / 2)) as link:
            cloud = api.connect(link.address, require=True)
            try:
                yield cloud
            finally:
                cloud.close()
