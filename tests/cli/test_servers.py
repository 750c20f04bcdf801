"""`skydraft serve`, `gateway` and `generate --cloud` as a newcomer runs them: what they print, how they end."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ..gateway.running import TOYS, Apart, client
from ..serving import PATIENCE_S, Serving, unhurried
from ..starting import Started
from ..stock.fakes import fake
from .conftest import Invoke

EDGE = ["--edge-model", "toy:drift=0.2"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no cloud that is gone."""
    monkeypatch.setattr("skydraft.edge.cloud.waiting_for", unhurried)


def test_a_server_audits_what_it_did_not_check(invoke: Invoke, server: Serving, tmp_path: Path) -> None:
    edge = ("generate", "语速", *EDGE, "--mode", "edge")
    alone = invoke(*edge)[1]
    for cloud, is_there in (server.address, True), ("127.0.0.1:1", False):
        given = ["--cloud", cloud, "--audit-share", "1", "--learn", str(tmp_path / cloud)]
        status, out, err = invoke(*edge, *given)
        assert (status, out) == (0, alone), err
        assert bool(re.search(r"no calls · audited agreement 0\.\d\d over 1 · ", err)) == is_there, err
        assert ("the answer was not audited" in err) != is_there, err
        assert not is_there or "\n1 answer" in invoke("learn", "status", str(tmp_path / cloud))[1]


NOBODY = ("127.0.0.1:9", "http://127.0.0.1:9/v1")  # the discard port


@pytest.mark.parametrize("address", NOBODY)
def test_a_cloud_never_reached_is_an_error_unless_texts_may_begin_without_it(invoke: Invoke, address: str) -> None:
    gated = ["generate", "你好", *EDGE, "--gate", "entropy:0.1", "-n", "20", "--cloud", address]
    status, out, err = invoke(*gated)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert re.search(r"9\S* was not reached \(no connection.*(refused|failed)\)+\. .* --fallback=start", err)
    status, out, err = invoke(*gated, "--fallback", "start")
    assert status == 0 and out.strip() and err.count("going on without it") == 1


@pytest.mark.parametrize("more", [(), ("--fallback", "start")])
def test_what_no_waiting_cures_is_found(invoke: Invoke, server: Serving, guarded: Any, foreign: str, more: Any) -> None:
    """Before the first token, though nothing is escalated."""
    alone = ["generate", "你好", *EDGE, "-n", "8", "--gate", "entropy:99", "-m", "quality", *more, "--cloud"]
    with fake("openai") as plain_http:
        wrong = {
            guarded[0]: "token", foreign: "other tokens than the draft model",
            f"127.0.0.1:{plain_http.port}": "its address is http://",
        }  # fmt: skip
        for address, what in wrong.items():
            status, out, err = invoke(*alone, address)
            assert status in (1, 2) and out == "" and what in err and err.count("\n") == 1
            status, _, err = invoke("gateway", *EDGE, "--port", "0", "--cloud", address)
            assert status in (1, 2) and what in err and "Traceback" not in err
    assert invoke(*alone, server.address, "-q")[2] == ""


def test_a_text_that_waits_for_a_lost_server_says_so(invoke: Invoke) -> None:
    lost = ("generate", "你好", *EDGE, "--require-cloud", "--cloud", "127.0.0.1:9", "--cloud-timeout", "2.5")
    status, _, err = invoke(*lost)
    first, last = err.splitlines()
    assert status == 1 and first.endswith("waiting up to 2.5 s for it.") and "--cloud-timeout" in last


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_serve_says_where_it_is_and_ends_cleanly(number: signal.Signals) -> None:
    process = Started("serve", "--model", "toy", "--port", "0", stderr=subprocess.PIPE)
    assert process.stderr is not None
    first = process.stderr.readline()
    assert re.match(r"skydraft: toy on 127\.0\.0\.1:\d+ \(plaintext, .*exact.*8 sessions of 4096 tokens", first)
    process.send_signal(number)
    _, rest = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0 and rest.splitlines()[-1] == "skydraft: stopped." and "Traceback" not in rest
    assert "stopping; requests that have begun get up to 30 s. Ctrl-C again ends them at once." in rest


def test_it_says_where_it_is_answers_and_stops() -> None:
    """The gateway."""
    running = Apart(*TOYS, "-s", "慢", "--log-prompts")
    assert "toy:drift=0.2 drafts, toy checks (no key is required)" in running.printed
    assert "skydraft-auto" not in running.printed
    body = {"model": "skydraft", "messages": [{"role": "user", "content": "语速"}], "max_tokens": 5}
    status, reply = running.post(json.dumps(body).encode())
    assert status == 200 and json.loads(reply)["usage"]["prompt_tokens"] == 3  # with the system prompt
    with client(running.port, json.dumps(body | {"stream": True, "max_tokens": 4000}).encode()) as reading:
        assert reading.recv(100)  # somebody is still reading
        status, took_s = running.stop(signal.SIGINT)  # other signals are as for serve
    assert status == 0 and took_s < 15
    assert "stopped" in running.printed and '"prompt": ["慢", "语速"]' in running.printed
    assert "Traceback" not in running.printed
