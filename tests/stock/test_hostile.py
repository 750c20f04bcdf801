"""What only servers without skydraft can do wrong: answers of HTTP, of each dialect, of text, and in the handshake.
What any server can do is in `tests/hostile`, with the same promises."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft.edge.cloud import Cloud
from skydraft.edge.stock.meeting import Met
from skydraft.engines.toy import character_vocab
from skydraft.errors import SkydraftError, VocabularyMismatch
from tests.hostile.texts import ALONE, LENGTH, PLANS, TARGET, assert_all_is_accounted_for, assert_one_clear_line, write
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault
from tests.toys import law

DIALECTS = ["vllm", "llama-server", "sglang"]

# What goes on for ever, from some request on, and only HTTP has; and what each dialect reads by itself.
STORMS: dict[str, Fault] = {
    "400": faults.refuses(400),
    "a page of an error": faults.says(b"<html>\n<h1>502</h1>\n</html>", status=502),
    "a list": faults.says(b"data: [[[]]]\n\n", "text/event-stream"),
    "an error in the stream": faults.says(b'data: {"error": {"message": "x"}}\n\n', "text/event-stream"),
    "deep": faults.says(b"data: " + b"[" * 100_000 + b"\n\n", "text/event-stream"),
    "a redirect": faults.redirects("http://127.0.0.1:1/"),
    "a redirect to itself": faults.redirects("/v1/completions", 308),
    "a gzip bomb as a stream": faults.gzip_bomb(1 << 28, "text/event-stream"),
    "headers and silence": faults.stalls(0),
    "ids beyond the vocabulary": faults.calls_it(lambda token_id: 10**6),
    "ids beyond all numbers": faults.calls_it(lambda token_id: 10**30),
    "negative ids": faults.calls_it(lambda token_id: -1),
    "ids as words": faults.calls_it(str),
    "ids as fractions": faults.calls_it(lambda token_id: token_id + 0.5),
    "ids as truth": faults.calls_it(lambda token_id: True),
    "no ids": faults.calls_it(lambda token_id: None),
}
# What begins well, and so is part of the text until it is noticed.
LATER = {
    "cut after three tokens": faults.cut(3),
    "cut within a token": faults.cut(3, 20),
    "stalls after three tokens": faults.stalls(3),
}


@pytest.fixture(scope="module")
def lines() -> Iterator[dict[str, tuple[Fake, Cloud]]]:
    """A server of each kind with one connection, which all tests use: what one text met does not hurt the next."""
    with ExitStack() as stack:
        servers = {dialect: stack.enter_context(fake(dialect, TARGET)) for dialect in DIALECTS}
        yield {dialect: (each, stack.enter_context(known(each, 0.7))) for dialect, each in servers.items()}


@pytest.fixture
def line(lines: dict[str, tuple[Fake, Cloud]], dialect: str) -> Iterator[tuple[Fake, Cloud]]:
    """A server of this kind, well until it is told not to be, and a connection to it."""
    server, cloud = lines[dialect]
    server.fault_of = lambda path: None
    assert write(cloud, "cloud").run().token_ids == ALONE
    yield server, cloud


@contextmanager
def known(server: Fake, timeout_s: float) -> Iterator[Cloud]:
    """A connection that has been used, so that all is known of the server."""
    with closing(skydraft.connect(f"{server.url}/v1", timeout_s=timeout_s)) as cloud:
        assert write(cloud, "cloud").run().token_ids == ALONE
        yield cloud


def storm(server: Fake, fault: Fault, after: int, num: int = 1 << 30) -> None:
    """`num` requests that generate fail so, after the next few."""
    left = [None] * after + [fault] * min(num, 1000)
    server.fault_of = lambda path: (left.pop(0) if left else None) if path in GENERATING else None


@pytest.fixture(params=["checks", "writes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How drafts are judged, whatever was measured: in one request along the draft, or by writing from the base."""
    checks = request.param == "checks"
    monkeypatch.setattr(Met, "checks", lambda self, num: checks and self.dialect.checks and num > 0)
    return str(request.param)


CASES = [(dialect, name) for name in STORMS for dialect in DIALECTS if dialect == "vllm" or "ids" in name]
WIRED: dict[str, Fault] = {
    "500": faults.refuses(500), "401": faults.refuses(401), "a page": faults.says(b"<html>"),
    "null": faults.says(b"data: null\n\n", "text/event-stream"), "a list": STORMS["a list"],
    "gigabytes of events": faults.floods(b"data: " + b" " * 4000 + b"{}\n\n"),
    "a gzip bomb": faults.gzip_bomb(1 << 28), "silence": faults.silent(),
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "name"), CASES)
def test_a_gated_text_goes_on_alone(line: tuple[Fake, Cloud], dialect: str, name: str, way: str) -> None:
    if way == "checks" and (dialect == "llama-server" or (dialect == "sglang" and "ids" in name)):
        pytest.skip("llama-server is not asked so, and what SGLang says then is the prompt's own ids")
    server, cloud = line
    storm(server, STORMS[name], after=2)
    began = time.monotonic()
    generation = write(cloud, "gated")
    assert generation.run().finish_reason == "length"
    assert "edge-fallback" in generation.origins and len(generation.token_ids) == LENGTH
    assert time.monotonic() - began < PATIENCE_S
    assert_all_is_accounted_for(generation)


@pytest.mark.parametrize(("dialect", "name"), CASES)
def test_a_text_that_is_always_verified_ends_with_one_clear_line(line: tuple[Fake, Cloud], name: str) -> None:
    server, cloud = line
    storm(server, STORMS[name], after=0)
    generation = write(cloud, "cloud")
    with pytest.raises(SkydraftError) as failed:
        generation.run()
    assert_one_clear_line(failed.value)
    assert generation.token_ids == ALONE[: len(generation.token_ids)]


@law(24)
@given(
    st.sampled_from(DIALECTS), st.sampled_from([*STORMS, *LATER]), st.sampled_from([*PLANS]), st.integers(0, 6),
    st.booleans(),
)  # fmt: skip
def test_what_fails_once_costs_no_token(
    lines: dict[str, tuple[Fake, Cloud]], dialect: str, name: str, plan: str, after: int, checks: bool
) -> None:
    """A server that fails once and then is well again: every text is what it would have been, or says why not."""
    server, cloud = lines[dialect]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Met, "checks", lambda self, num: checks and self.dialect.checks and num > 0)
        storm(server, (STORMS | LATER)[name], after=0 if plan == "cloud" else after, num=1)
        generation = write(cloud, plan)
        try:
            generation.run()
        except SkydraftError as error:
            assert_one_clear_line(error)
            assert plan != "gated" or name == "400"
        else:
            assert len(generation.token_ids) == LENGTH
            assert plan == "gated" or generation.token_ids == ALONE
        assert_all_is_accounted_for(generation)
        server.fault_of = lambda path: None


# --- Text in place of ids


@pytest.mark.parametrize(("api", "plan"), [("completions", "gated"), ("completions", "cloud"), ("chat", "gated")])
@pytest.mark.parametrize("name", [*WIRED, *LATER])
def test_a_server_of_text_that_fails_costs_no_token(name: str, api: str, plan: str) -> None:
    """What it writes is cut into tokens here. Where each try brings three of them, a text comes to its end so."""
    with (
        fake("completions" if api == "completions" else "vllm", TARGET) as server,
        closing(skydraft.connect(server.url, timeout_s=0.7, api=api, model="toy")) as cloud,
    ):
        raw = api != "chat"  # the toy's template adds nothing
        assert write(cloud, "cloud", raw=raw).run().token_ids == ALONE
        storm(server, (WIRED | LATER)[name], after=0 if plan == "cloud" else 2)
        generation = write(cloud, plan, raw=raw)
        try:
            generation.run()
        except SkydraftError as error:
            assert plan == "cloud" or name == "401"
            assert_one_clear_line(error)
        else:
            assert "edge-fallback" in generation.origins or name in LATER
            assert len(generation.token_ids) == LENGTH
        assert_all_is_accounted_for(generation)


# --- The handshake

GREETINGS: dict[str, tuple[str, Fault]] = {
    "no models": ("/v1/models", faults.says(b'{"data": []}', "application/json")),
    "models of nobody": ("/v1/models", faults.says(b'{"data": [{"id": "x"}]}', "application/json")),
    "models that are no list": ("/v1/models", faults.says(b'{"data": 7}', "application/json")),
    "a model without a name": ("/v1/models", faults.says(b'{"data": [{"owned_by": "vllm"}]}', "application/json")),
    "a model named by a list": (
        "/v1/models", faults.says(b'{"data": [{"id": [], "owned_by": "vllm"}]}', "application/json"),
    ),
    "two models": (
        "/v1/models",
        faults.says(b'{"data": [{"id": "a", "owned_by": "vllm"}, {"id": "b", "owned_by": "vllm"}]}'),
    ),
    "a page": ("/v1/models", faults.says(b"<html>")),
    "an escape sequence": ("/v1/models", faults.says(b'{"data": [{"owned_by": "\\u001b[2J\\n"}]}')),
    "503": ("/v1/models", faults.refuses(503)),
    "404": ("/v1/models", faults.refuses(404)),
    "401": ("/v1/models", faults.refuses(401)),
    "a redirect": ("/v1/models", faults.redirects("https://example.com/v1/models")),
    "gigabytes": ("/v1/models", faults.floods(b" " * 65536, "application/json")),
    "a gzip bomb": ("/v1/models", faults.gzip_bomb(1 << 28)),
    "silence": ("/v1/models", faults.silent()),
    "other ids": ("/tokenize", faults.says(b'{"tokens": [1, 2, 3]}', "application/json")),
    "ids that are words": ("/tokenize", faults.says(b'{"tokens": ["a"]}', "application/json")),
    "no tokenizer": ("/tokenize", faults.says(b'{"tokens": null}', "application/json")),
}  # fmt: skip


@pytest.mark.parametrize("plan", ["gated", "cloud"])
@pytest.mark.parametrize("name", GREETINGS)
def test_a_server_that_cannot_be_met_is_one_clear_line(name: str, plan: str) -> None:
    """A gated text goes on alone where the server may become well; what is wrong with the choice of it is said."""
    where, fault = GREETINGS[name]
    with fake("vllm", TARGET) as server, closing(skydraft.connect(f"{server.url}/v1", timeout_s=0.7)) as cloud:
        server.fault_of = lambda path: fault if path == where else None
        generation = write(cloud, plan)
        try:
            generation.run()
        except SkydraftError as error:
            assert_one_clear_line(error)
        else:
            assert plan == "gated" and "edge-fallback" in generation.origins
        assert not set(generation.origins) & {"accepted", "recovered", "bonus", "cloud"}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_another_tokenizer_is_said_and_no_token_used(dialect: str, plan: str) -> None:
    with fake(dialect, TARGET) as server, closing(skydraft.connect(f"{server.url}/v1")) as cloud:
        server.model.tokenizer = character_vocab("一二三")
        generation = write(cloud, plan)
        with pytest.raises(VocabularyMismatch) as failed:
            generation.run()
        assert_one_clear_line(failed.value)
        assert not set(generation.origins) & {"accepted", "recovered", "bonus", "cloud"}


# --- Time


def test_a_storm_is_not_answered_by_a_storm() -> None:
    """A server that says when to come back is not asked before."""
    with fake("vllm", TARGET) as server, known(server, 2.5) as cloud:
        storm(server, faults.refuses(429, Retry_After="1"), after=0)
        before = len(server.model.asked)
        with pytest.raises(SkydraftError):
            write(cloud, "cloud").run()
        assert 2 <= sum(asked.path in GENERATING for asked in server.model.asked[before:]) <= 4
