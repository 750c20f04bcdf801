"""Who may come in, and what broken, slow and endless requests get."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx2 as httpx
import pytest

from skydraft.access.keys import Keyring
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import OptionError
from skydraft.gateway import app, server
from skydraft.gateway.server import ListenOptions

from .interfaces import ALL_WHOLE, plain
from .running import PATIENCE_S, Running, gateway

KEY = "a-key-of-more-than-16-characters"


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with two keys, an origin of its own and short patience."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ann {KEY}\nbob {KEY}-2\n")
    limits = {"max_body_bytes": 100_000, "body_s": 0.5}
    with gateway(authorize=Keyring(keys).label, origins=("http://app.test",), **limits) as running:
        yield running


def said(running: Running, asks: bytes) -> bytes:
    """All that comes on a connection that says this, until the gateway closes it."""
    with socket.create_connection(("127.0.0.1", running.port), 10) as client:
        client.sendall(asks)
        return client.makefile("rb").read()


def post(running: Running, **options: Any) -> httpx.Response:
    given = {"json": plain("chat/completions", limit=4)} | options
    return running.client.post(f"{running.v1}/chat/completions", **given)


WRONG_KEYS = [
    {}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}, {"x-api-key": "wrong"}, {"x-api-key": ""},
]  # fmt: skip
KEYS = [{"Authorization": f"Bearer {KEY}"}, {"x-api-key": f"{KEY}-2"}]


@pytest.mark.parametrize("headers", [*WRONG_KEYS, *KEYS])
def test_without_a_key_nothing_is_told_but_the_page_and_health(locked: Running, headers: dict[str, str]) -> None:
    def status(path: str) -> int:
        return locked.client.get(locked.url + path, headers=headers).status_code

    assert {status(path) for path in ("/", "/health", "/page/main.js")} == {200}
    told = {status(path) for path in ("/v1/models", "/v1/models/skydraft", "/metrics", "/v1/nothing")}
    reply = post(locked, headers=headers)
    if headers in KEYS:
        assert told == {200, 404} and reply.status_code == 200
    else:
        assert told == {401} and reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"


def test_the_page_runs_nothing_but_its_own(locked: Running) -> None:
    policy = locked.client.get(locked.url).headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_a_key_that_has_much_to_be_read_lets_no_other_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    go, began, prompted = threading.Event(), list[str](), app.prompted

    def slow(request: GenerateRequest, *given: Any) -> Any:
        began.append(text := str(request.messages[-1].content))
        assert text != "慢" or go.wait(PATIENCE_S)
        return prompted(request, *given)

    monkeypatch.setattr(app, "prompted", slow)
    with gateway(authorize=str) as running, ThreadPoolExecutor(3) as pool:

        def read(text: str, key: str) -> Any:
            body = {"model": "skydraft", "messages": [{"role": "user", "content": text}]}
            url, headers = f"{running.v1}/chat/completions/input_tokens", {"Authorization": key}
            return running.client.post(url, json=body, headers=headers)

        flood = [pool.submit(read, "慢", "ann") for _ in range(3)]
        running.wait_until(lambda: bool(began))
        quick = read("快", "bob")
        assert quick.status_code == 200 and began == ["慢", "快"]
        go.set()
        assert {each.result().status_code for each in flood} == {200}


def test_other_origins_may_use_it_only_when_they_are_named(locked: Running, served: Running) -> None:
    asked = {"Origin": "http://app.test", "Access-Control-Request-Method": "POST"}
    allowed = locked.client.options(f"{locked.v1}/chat/completions", headers=asked)
    assert allowed.headers["access-control-allow-origin"] == "http://app.test"
    for running, origin in ((locked, "http://other.test"), (served, "http://app.test")):
        reply = running.client.options(f"{running.v1}/chat/completions", headers=asked | {"Origin": origin})
        assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
def test_a_request_of_two_lengths_is_refused_and_the_connection_closed(served: Running, path: str) -> None:
    """A proxy that goes by the other length would take the rest for another client's request."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = said(served, f"{head}0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b" 400 " in reply.splitlines()[0] and reply.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_local_only_in_a_wrong_place_is_refused_and_not_passed_over(served: Running, path: str) -> None:
    asked, private = plain(path, model="skydraft-lossless"), {"local_only": True}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"local_only": {}}}}}
    for wrong in (private, {"extra_body": {"skydraft": private}}, {"Skydraft": private}):
        assert served.post(path, **asked | wrong).status_code == 400
    its_own = {"tools": [tool]} if path == "chat/completions" else {}
    for right in ({}, its_own, {"skydraft": private}, {"skydraft": {"local_only": False}}):
        assert served.post(path, **asked | right).status_code == 200


def test_a_strangers_page_in_the_users_browser_gets_nothing(served: Running) -> None:
    port = served.url.rsplit(":", 1)[1]
    for headers in (
        {"Origin": "http://evil.test"}, {"Origin": "null"}, {"Host": f"evil.test:{port}"}, {"Host": ""},
        {"Host": f"evil.test:{port}", "Origin": f"http://evil.test:{port}"}, {"Host": "["}, {"Host": "a[b]"},
        {"Origin": "http://["}, {"Host": "evil.test@localhost"}, {"Host": "localhost/x"}, {"Host": "localhost#.evil"},
    ):  # fmt: skip
        assert served.client.get(f"{served.v1}/models", headers=headers).status_code == 403
        assert post(served, headers=headers | {"Content-Type": "text/plain"}).status_code == 403
    ours = ({"Origin": served.url}, {"Host": f"localhost:{port}"}, {"Host": f"[::1]:{port}"}, {"Host": "127.0.0.2"})
    for headers in ours:
        assert served.client.get(f"{served.v1}/models", headers=headers).status_code == 200


@pytest.mark.parametrize(("content", "status"), [
    (b"{", 400), (b"[]", 400), (b"", 400), (b"\xff\xfe", 400), (b"null", 400), (b"[" * 50_000, 400),
    (b'{"model": "skydraft", "messages": 3}', 400), (b" " * 100_001, 413), (b'{"model": "x\\ud800"}', 400),
    (b'{"model": "x\xed\xa0\x80"}', 400), ('{"model": "x"}'.encode("utf-16"), 400),
])  # fmt: skip
def test_broken_bodies(locked: Running, content: bytes, status: int) -> None:
    reply = post(locked, json=None, content=content, headers={"x-api-key": KEY})
    assert reply.status_code == status and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert post(locked, headers={"x-api-key": KEY}).status_code == 200


def test_a_body_that_never_ends_is_cut_off(locked: Running) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 10_000

    with suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):  # while it was still sending
        assert post(locked, json=None, content=endless(), headers={"x-api-key": KEY}).status_code == 413
    assert post(locked, headers={"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize(("path", "num_bytes", "num_sent", "status"), [
    ("/v1/chat/completions", 100 << 20, 1, 413),  # by its length alone
    ("/v1/chat/completions", 100, 1, 408),  # too slow
    ("/health", 99_000, 50, 405),  # what needs no key takes no body, and does not wait for the rest
])  # fmt: skip
def test_a_body_withheld_is_refused(locked: Running, path: str, num_bytes: int, num_sent: int, status: int) -> None:
    key = "" if path == "/health" else f"x-api-key: {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", locked.port), timeout=10) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\n{key}Content-Length: {num_bytes}\r\n\r\n"
        client.sendall(head.encode() + b" " * num_sent)
        assert f" {status} ".encode() in client.recv(1000).splitlines()[0]


def test_beyond_this_machine_keys_want_tls_too() -> None:
    """What else is wrong with an address stands in tests/cli/test_wrong_use.py."""
    with pytest.raises(OptionError, match="unencrypted"):
        ListenOptions(host="192.168.1.5", has_keys=True)
    ListenOptions(host="0.0.0.0", has_keys=True, insecure=True)
    ListenOptions(host="::1")


def test_no_token_waits_for_nagles_algorithm() -> None:
    with server.listen(ListenOptions(port=0)) as listening:
        assert listening.proto == socket.IPPROTO_TCP  # without it asyncio leaves the algorithm on
