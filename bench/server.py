"""A `skydraft serve` process for measurements: started, killed, and started again."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys


class ServerProcess:
    """A server on a port of loopback that stays the same over restarts. `changed` is Python that it runs first."""

    def __init__(self, model: str, *options: str, changed: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        program = f"{changed}\nimport runpy; runpy.run_module('skydraft.cli.main', run_name='__main__')"
        self._command = [sys.executable, "-c", program, "serve", "--model", model, "--port", str(self.port)]
        self._command += ["--log-level", "error", *options]
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if "sessions of" not in line:
            raise SystemExit(f"the server did not start: {line}{self._process.stderr.read()}")

    def kill(self) -> None:
        """SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        if self._process.stderr:
            self._process.stderr.close()

    def signal(self, number: signal.Signals) -> None:
        """SIGSTOP, for example."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self._process.terminate()
        self._process.wait()
