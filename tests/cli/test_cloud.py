"""`skydraft serve` and `generate --cloud` as a newcomer runs them: what they print, how they exit."""

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from skydraft.engines.toy import open_toy

from ..serving import PATIENCE_S, Serving, serving, unhurried
from ..starting import Started
from ..stock.fakes import fake
from .conftest import Invoke

EDGE = ["--edge-model", "toy:drift=0.2"]


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(open_toy("toy")) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The address of a server that wants a token, and a file with one."""
    token_file = tmp_path_factory.mktemp("guarded") / "tokens"
    token_file.write_text("phone a-token-of-24-characters\n")
    with serving(open_toy("toy"), token_file=token_file) as running:
        yield running.address, str(token_file)


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    """The address of a server with another vocabulary."""
    other = open_toy("toy")
    other.vocab = type(other.vocab)([b"a", b"<eos>"], lambda text: [0], special_ids=[1], end_ids=[1])
    with serving(other) as running:
        yield running.address


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no cloud that is gone."""
    monkeypatch.setattr("skydraft.edge.cloud.waiting_for", unhurried)


def test_generate_over_a_link_prints_what_it_prints_in_one_process(invoke: Invoke, server: Serving) -> None:
    common = ["generate", "你好", *EDGE, "--mode", "quality", "--hand-back", "0", "--max-new-tokens", "20", "--json"]
    status, out, err = invoke(*common, "--cloud", server.address)
    far, near = json.loads(out), json.loads(invoke(*common, "--cloud-model", "toy")[1])
    assert (status, err) == (0, "")
    assert list(far) == list(near) and list(far["stats"]) == list(near["stats"])
    for name in ("text", "token_ids", "origins", "finish_reason", "prompt_tokens"):
        assert far[name] == near[name]
    assert far["stats"]["bytes_up"] > 0 == near["stats"]["bytes_up"]


def test_a_server_audits_what_it_did_not_check(invoke: Invoke, server: Serving, tmp_path: Path) -> None:
    alone = invoke("generate", "语速", *EDGE, "--mode", "edge")[1]
    for cloud, learned in (server.address, 1), ("127.0.0.1:1", 0):
        given = ["--cloud", cloud, "--audit-share", "1", "--learn", str(tmp_path / cloud)]
        status, out, err = invoke("generate", "语速", *EDGE, "--mode", "edge", *given)
        assert (status, out) == (0, alone), err
        assert (re.search(r"no calls · audited agreement 0\.\d\d over 1 · ", err) is not None) == bool(learned), err
        assert ("the answer was not audited" in err) != bool(learned), err
        assert "\n1 answer" in invoke("learn", "status", str(tmp_path / cloud))[1] or not learned


NOBODY = ("127.0.0.1:9", "http://127.0.0.1:9/v1")  # the discard port


@pytest.mark.parametrize("address", NOBODY)
def test_a_cloud_never_reached_is_an_error_unless_texts_may_begin_without_it(invoke: Invoke, address: str) -> None:
    gated = ["generate", "你好", *EDGE, "--gate", "entropy:0.1", "-n", "20", "--cloud", address]
    status, out, err = invoke(*gated)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert re.search(r"9\S* was not reached \(no connection.*(refused|failed)\)+\. .* --fallback=start", err)
    status, out, err = invoke(*gated, "--fallback", "start")
    assert status == 0 and out.strip() and err.count("going on without it") == 1
    status, _, err = invoke(*gated, "--require-cloud", "--cloud-timeout", "0.3")
    assert status == 1 and "did not answer" in err
    assert invoke(*gated, "--require-cloud", "--fallback", "start")[0] == 2


@pytest.mark.parametrize("more", [(), ("--fallback", "start")])
def test_what_waiting_does_not_cure_is_found_before_the_first_token_though_nothing_is_escalated(
    invoke: Invoke, server: Serving, guarded: tuple[str, str], foreign: str, more: tuple[str, ...]
) -> None:
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


@pytest.mark.parametrize("more", [(), ("-m", "cloud", "--cloud-timeout", "0.3")])
def test_the_address_of_ours_has_no_http(invoke: Invoke, server: Serving, more: tuple[str, ...]) -> None:
    status, out, err = invoke("generate", "你好", *EDGE, *more, "--cloud", f"http://{server.address}")
    assert (status, out) == (1, "") and "the address of skydraft serve has no http://" in err


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


@pytest.mark.parametrize("cloud", [(), ("--cloud", "127.0.0.1:9")])
def test_a_port_for_drafts_needs_a_vllm(invoke: Invoke, cloud: tuple[str, ...]) -> None:
    status, out, err = invoke("generate", "你好", *EDGE, *cloud, "--drafts", "127.0.0.1:7374")
    assert (status, out, err.count("\n")) == (2, "", 1) and "--drafts is for a vLLM" in err
