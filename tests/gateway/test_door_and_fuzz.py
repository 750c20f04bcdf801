"""Who may come in, and what broken, slow and endless requests get.

Requests that nobody wrote by hand do no harm; and what clients say is characters to the models, never a mark.
"""

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given

import skydraft
from skydraft.access.keys import Keyring
from skydraft.decoding.request import GenerateRequest
from skydraft.errors import OptionError
from skydraft.gateway import app, server
from skydraft.gateway.server import ListenOptions

from ..mutating import as_bytes, mutated
from ..reading_marks import engine_with, num_special, texts
from ..stock.fakes import Fake, fake
from ..toys import law
from .interfaces import ALL_WHOLE, plain
from .running import PATIENCE_S, TOYS, Apart, Running, apart, gateway, over
from .test_fields import FOLLOWED, FOLLOWED_IN
from .test_interfaces import CONVERSATION, SAME

KEY = "a-key-of-more-than-16-characters"
TEMPLATE = (Path(__file__).parents[1] / "prompts" / "templates" / "qwen2.5.jinja").read_text("utf-8")
Served = tuple[Fake, Running]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A gateway with two keys, an origin of its own and short patience."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"ann {KEY}\nbob {KEY}-2\n")
    limits = {"max_body_bytes": 100_000, "body_s": 0.5}
    with gateway(authorize=Keyring(keys).label, origins=("http://app.test",), **limits) as running:
        yield running


@pytest.fixture(scope="module", params=["vllm", "llama-server", "sglang"])
def served_by(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A gateway over each kind of server that is sent token ids."""
    draft, target = engine_with(TEMPLATE), engine_with(TEMPLATE)
    with fake(request.param, target) as far, over(skydraft.connect(far.url, require=True), draft) as running:
        yield far, running


def said(running: Running, asks: bytes) -> bytes:
    """All that comes on a connection that says this, until the gateway closes it."""
    with socket.create_connection(("127.0.0.1", running.port), 10) as client:
        client.sendall(asks)
        return client.makefile("rb").read()


def post(running: Running, **options: Any) -> httpx.Response:
    given = {"json": plain("chat/completions", limit=4)} | options
    return running.client.post(f"{running.v1}/chat/completions", **given)


def saying(value: Any, text: str) -> Any:
    """A body with this text in place of each that a client has written: those of SAME are Chinese."""
    if isinstance(value, list):
        return [saying(each, text) for each in value]
    if isinstance(value, dict):
        arguments = value.get("arguments")
        if isinstance(arguments, str):
            value = value | {"arguments": json.dumps(saying(json.loads(arguments), text))}
        return {text if key == "city" else key: saying(each, text) for key, each in value.items()}
    return text if isinstance(value, str) and not value.isascii() and value != "天气" else value


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


# Requests of all interfaces with tools, calls and results.
TALKS = [(path, body) for path, body, _ in SAME.values() if "tools" in body] + [("chat/completions", CONVERSATION)]
TALKS += [("chat/completions", CONVERSATION | {"messages": CONVERSATION["messages"][:5]})]  # it ends with results


@pytest.mark.parametrize("talk", range(len(TALKS)))
@given(text=texts)
@law(5)
def test_a_server_of_ids_gets_no_mark(served_by: Served, talk: int, text: str) -> None:
    (far, served), (path, body) = served_by, TALKS[talk]
    read = []
    for given_text in (text, "x"):
        num_asked = len(far.model.asked)
        answer = served.post(path, **plain(path, limit=1, model="skydraft-cloud") | saying(body, given_text))
        assert answer.status_code == 200, answer.text
        prompts = [prompt for asked in far.model.asked[num_asked:] for prompt in asked.prompts]
        read.append(set(map(num_special, prompts)) - {0})  # what a server is measured with has none
    assert read[0] == read[1] and len(read[0]) == 1


LATE_S, MUCH_MIB = 2.0, 250.0
EXPECTED = {200, 400, 404, 413}
FUZZED = (*FOLLOWED_IN, "responses/input_tokens")
MODELS = ["skydraft", *(f"skydraft-{mode}" for mode in ("edge", "cloud", "lossless", "fluency", "quality", "answers"))]
OURS: dict[str, list[Any]] = {
    "gate": ["entropy:1", "always"], "mode": ["edge", "cloud", "quality"], "k": [3],
    "hand_back": [8, "agree:2"], "grammar": ["regex:[0-9]+", "json_object:", 'lark:start: "a"+'], "token_ids": [True],
    "style": ["zh-short"], "local_only": [True], "break_loops": [False], "no_repeat_ngram_size": [3],
}  # fmt: skip
TEXTS = ["a", "语速", "a b\n", "我 们", "c", ""]


def requests(seed: int) -> Iterator[tuple[str, bytes]]:
    """Endless requests, (path, body), most with some damage."""
    rng = Random(seed)
    while True:
        path, model = rng.choice(FUZZED), rng.choice(MODELS)
        body: Any = _sound(path, model, rng)
        for _ in range(rng.choice([0, 1, 1, 1, 2, 5])):
            body = mutated(body, rng)
        if isinstance(body, dict) and rng.random() < 0.9:
            body["model"] = model
        yield f"/v1/{path}", as_bytes(body, rng)


def _sound(path: str, model: str, rng: Random) -> dict[str, Any]:
    name, text = path.removesuffix("/input_tokens"), rng.choice(TEXTS)
    talks = [talk for path, talk in TALKS if path == name and rng.random() < 0.5]
    fields = {key: value for key, value in (FOLLOWED | FOLLOWED_IN[name]).items() if rng.random() < 0.1}
    ours = rng.sample(list(OURS), rng.choice([0, 1, 3]))
    fields |= {"skydraft": {key: rng.choice(OURS[key]) for key in ours}}
    body = plain(name, text, rng.choice([1, 4, 9]), model=model)
    return body | (saying(rng.choice(talks), text) if talks else {}) | fields


def ask(running: Apart, asked: Iterator[tuple[str, bytes]], wrong: list[str]) -> None:
    for path, body in asked:
        try:
            status, reply = running.post(body, path)
        except (OSError, http.client.HTTPException) as error:
            wrong.append(f"{error!r} {path} {body[:2000]!r}")
            continue
        if status not in EXPECTED or (status != 200 and not json.loads(reply)["error"]["message"]):
            wrong.append(f"{status} {reply[:300]!r} {path} {body[:2000]!r}")


def test_no_request_does_harm() -> None:
    wrong: list[str] = []
    with apart(*TOYS, "--context", "256", "-n", "8") as running:
        running.health()
        with running.watched() as seen:
            several = [islice(requests(seed), 80) for seed in (1, 2, 3)]
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda each: ask(running, each, wrong), several))
        assert not wrong, "\n".join(wrong[:3])
        assert not seen.wrong and seen.worst_s < LATE_S and seen.grew_mib < MUCH_MIB
    assert '"level": "error"' not in running.printed
