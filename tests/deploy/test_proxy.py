"""deploy/nginx.conf in front of a gateway, where nginx is installed: TLS, streams, and clients that are slow."""

import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from ..gateway.running import Running, gateway, toy_pair
from ..serving import PATIENCE_S, certified, free_port, waiting

CONFIGURATION = (Path(__file__).parents[2] / "deploy" / "nginx.conf").read_text()
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="there is no nginx")
ASKS = {"model": "skydraft-edge", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 4000, "stream": True}


class Proxy:
    """nginx over a gateway that writes its answers for minutes."""

    def __init__(self, running: Running, port: int, trusts: ssl.SSLContext) -> None:
        self.running, self.port, self.trusts = running, port, trusts
        self.client = httpx.Client(base_url=f"https://localhost:{port}", verify=trusts, timeout=PATIENCE_S)

    def connect(self) -> ssl.SSLSocket:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        raw.settimeout(PATIENCE_S)
        raw.connect(("127.0.0.1", self.port))
        return self.trusts.wrap_socket(raw, server_hostname="localhost")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """Its times for slow clients are a second each; all else is as in the file."""
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    _, signer = certified(folder, "localhost")
    trusts = ssl.create_default_context(cadata=signer.decode())
    pair = toy_pair()
    waiting(pair.edge, lambda: time.sleep(0.03))
    with gateway(pair, authorize=lambda key: "ann") as running:
        text = CONFIGURATION
        for before, after in (
            ("listen 443", f"listen 127.0.0.1:{port}"), ("127.0.0.1:8137", f"127.0.0.1:{running.port}"),
            ("client_header_timeout 15s", "client_header_timeout 1s"), ("send_timeout 60s", "send_timeout 1s"),
            ("limit_conn addresses 64", "limit_conn addresses 2"), ("/run/nginx.pid", "nginx.pid"),
        ):  # fmt: skip
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (folder / "nginx.conf").write_text(text)
        command = [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        tried = subprocess.run([*command, "-t"], capture_output=True, text=True)
        assert tried.returncode == 0 and "warn" not in tried.stderr, tried.stderr
        with subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.DEVNULL) as nginx:
            running.wait_until(lambda: _answers(port))
            proxy = Proxy(running, port, trusts)
            yield proxy
            proxy.client.close()
            nginx.terminate()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_tokens_pass_as_they_are_written_and_who_hangs_up_frees_the_place(proxy: Proxy) -> None:
    with proxy.client.stream("POST", "/v1/chat/completions", json=ASKS) as reply:
        assert reply.status_code == 200 and "content" in next(reply.iter_text())
        assert proxy.running.gateway.desk.num_running == 1
    proxy.running.wait_until_idle()
    assert proxy.client.get("/health").json()["status"] == "ok"
    origin = {"Origin": f"https://localhost:{proxy.port}"}
    assert proxy.client.get("/v1/models", headers=origin).status_code == 200
    assert proxy.client.get("/v1/models", headers={"Origin": "https://evil.test"}).status_code == 403


@pytest.mark.parametrize("says", [b"", b"GET /health HTTP/1.1\r\nHost: "])
def test_a_head_that_does_not_come_is_cut_off(proxy: Proxy, says: bytes) -> None:
    with proxy.connect() as client:
        client.sendall(says)
        began = time.monotonic()
        assert not client.recv(1) and time.monotonic() - began < 20


def test_a_client_that_reads_nothing_is_hung_up_on(proxy: Proxy) -> None:
    gone = ConnectionError, ssl.SSLEOFError  # the other end is not only full
    with proxy.connect() as greedy, pytest.raises(gone):
        for _ in range(900):  # nginx itself ends a connection after a thousand
            greedy.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.01)


def test_one_address_has_so_many_requests_at_a_time(proxy: Proxy) -> None:
    with ExitStack() as streams:
        for _ in range(2):
            reply = streams.enter_context(proxy.client.stream("POST", "/v1/chat/completions", json=ASKS))
            assert reply.status_code == 200
        assert proxy.client.get("/health").status_code == 503
