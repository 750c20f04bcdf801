"""Servers that are not ours and fail, lie or flood: a gated text goes on alone, any other ends with one clear line, and
no token is lost or doubled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.edge.stock.server import Met
from skydraft.engines.toy import ToyEngine, open_toy
from skydraft.errors import SkydraftError
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault

TEXT, LENGTH = "语速", 40
PARAMS = DecodingParams(max_new_tokens=LENGTH)
DIALECTS = ["vllm", "llama-server", "sglang"]
PLANS = {
    "gated": make_plan(gate="entropy:0.3", k=4),
    "cloud": make_plan("cloud"),
    "checked": make_plan(gate="always", k=4),
}
TARGET, DRAFT = open_toy("toy"), open_toy("toy:drift=0.2")
ALONE = skydraft.generate(TEXT, cloud=TARGET, plan=PLANS["cloud"], params=PARAMS, raw=True).run().token_ids

# What goes on for ever, from some request on. All of it is over in the moment in which it is noticed.
STORMS: dict[str, Fault] = {
    "429": faults.refuses(429, Retry_After="0"),
    "500": faults.refuses(500),
    "503": faults.refuses(503),
    "400": faults.refuses(400),
    "404": faults.refuses(404),
    "401": faults.refuses(401),
    "a page": faults.says(b"<html><body>It works!</body></html>"),
    "a page of an error": faults.says(b"<html>\n<h1>502</h1>\n</html>", status=502),
    "an empty answer": faults.says(b"", "application/json"),
    "a list": faults.says(b"data: [[[]]]\n\n", "text/event-stream"),
    "null": faults.says(b"data: null\n\n", "text/event-stream"),
    "an error in the stream": faults.says(b'data: {"error": {"message": "x"}}\n\n', "text/event-stream"),
    "deep": faults.says(b"data: " + b"[" * 100_000 + b"\n\n", "text/event-stream"),
    "a redirect": faults.redirects("http://127.0.0.1:1/"),
    "a redirect to itself": faults.redirects("/v1/completions", 308),
    "cut before the answer": faults.cut(0),
    "cut within the first token": faults.cut(0, 20),
    "ids beyond the vocabulary": faults.calls_it(lambda token_id: 10**6),
    "ids beyond all numbers": faults.calls_it(lambda token_id: 10**30),
    "negative ids": faults.calls_it(lambda token_id: -1),
    "ids as words": faults.calls_it(str),
    "ids as fractions": faults.calls_it(lambda token_id: token_id + 0.5),
    "ids as truth": faults.calls_it(lambda token_id: True),
    "no ids": faults.calls_it(lambda token_id: None),
    "gigabytes of events": faults.floods(b"data: " + b" " * 4000 + b"{}\n\n"),
    "gigabytes in a line": faults.floods(b"data: " + b"7" * 65536),
    "a gzip bomb": faults.gzip_bomb(1 << 28),
    "a gzip bomb as a stream": faults.gzip_bomb(1 << 28, "text/event-stream"),
    "silence": faults.silent(),
    "headers and silence": faults.stalls(0),
}
# What begins well, and so is part of the text until it is noticed.
LATER = {
    "cut after three tokens": faults.cut(3),
    "cut within a token": faults.cut(3, 20),
    "stalls after three tokens": faults.stalls(3),
}


@pytest.fixture(scope="module")
def fakes() -> Iterator[dict[str, Fake]]:
    with ExitStack() as stack:
        yield {dialect: stack.enter_context(fake(dialect)) for dialect in DIALECTS}


@pytest.fixture
def server(fakes: dict[str, Fake], dialect: str) -> Iterator[Fake]:
    """A server of this kind, well until it is told not to be."""
    server = fakes[dialect]
    yield server
    server.fault_of = lambda path: None


@contextmanager
def known(server: Fake, timeout_s: float) -> Iterator[Cloud]:
    """A connection that has been used, so that all is known of the server."""
    with closing(skydraft.connect(f"{server.url}/v1", timeout_s=timeout_s)) as cloud:
        assert write(cloud, "cloud").run().token_ids == ALONE
        yield cloud


def write(cloud: Any, plan: str) -> Generation:
    execution: Any = {"execution": "throughput"} if plan == "checked" else {}
    return skydraft.generate(
        TEXT, edge=DRAFT, cloud=cloud, plan=PLANS[plan], params=PARAMS, raw=True, **execution
    )  # fmt: skip


def storm(server: Fake, fault: Fault, after: int, num: int = 1 << 30) -> None:
    """`num` requests that generate fail so, after the next few."""
    left = [None] * after + [fault] * min(num, 1000)
    server.fault_of = lambda path: (left.pop(0) if left else None) if path in GENERATING else None


def choices(engine: ToyEngine, token_ids: tuple[int, ...]) -> list[int]:
    """What a model chooses before each of these tokens, after those that precede it."""
    text = [*engine.vocab.encode(TEXT), *token_ids]
    sequence = engine.open(text[:1])
    try:
        rows = engine.extend_batch([(sequence, text)])[0]
        return [int(row.argmax()) for row in rows[len(text) - len(token_ids) - 1 : -1]]
    finally:
        sequence.close()


def assert_all_is_accounted_for(generation: Generation) -> None:
    """Each token is what its writer chose after exactly those before it: nothing is lost, doubled or made up."""
    own, other = choices(TARGET, generation.token_ids), choices(DRAFT, generation.token_ids)
    wanted = [
        mine if origin in ("skipped", "edge-fallback") else theirs
        for theirs, mine, origin in zip(own, other, generation.origins, strict=True)
    ]
    assert list(generation.token_ids) == wanted


def assert_one_clear_line(error: SkydraftError) -> None:
    assert "\n" not in str(error) and 20 < len(str(error)) < 400, str(error)
    assert "<" not in str(error) or "<h" in str(error)  # no object of ours


@pytest.fixture(params=["checks", "writes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How drafts are judged, whatever was measured: in one request along the draft, or by writing from the base."""
    checks = request.param == "checks"
    monkeypatch.setattr(Met, "checks", lambda self, num: checks and self.dialect.checks and num > 0)
    return str(request.param)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", STORMS)
def test_a_gated_text_goes_on_alone(server: Fake, dialect: str, name: str, way: str) -> None:
    if (dialect, way) == ("llama-server", "checks") or not is_asked_for(dialect, name, way):
        pytest.skip("it never asks so")
    with known(server, 0.7) as cloud:
        storm(server, STORMS[name], after=2)
        began = time.monotonic()
        generation = write(cloud, "gated")
        if name == "401":  # a key that does not fit is for the user to know
            with pytest.raises(SkydraftError) as refused:
                generation.run()
            assert_one_clear_line(refused.value)
        else:
            assert generation.run().finish_reason == "length"
            assert "edge-fallback" in generation.origins and len(generation.token_ids) == LENGTH
        assert time.monotonic() - began < PATIENCE_S
        assert_all_is_accounted_for(generation)


def is_asked_for(dialect: str, name: str, way: str) -> bool:
    """SGLang's checks say no id of their own but beside a log-probability: those are true here."""
    return not (dialect == "sglang" and way == "checks" and "ids" in name)


@pytest.mark.parametrize("plan", ["cloud", "checked"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", STORMS)
def test_a_text_that_is_always_verified_ends_with_one_clear_line(server: Fake, name: str, plan: str) -> None:
    with known(server, 0.7) as cloud:
        storm(server, STORMS[name], after=0 if plan == "cloud" else 2)
        generation = write(cloud, plan)
        with pytest.raises(SkydraftError) as failed:
            generation.run()
        assert_one_clear_line(failed.value)
        assert generation.token_ids == ALONE[: len(generation.token_ids)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", [*STORMS, *LATER])
def test_what_fails_once_costs_no_token(server: Fake, name: str, plan: str, way: str) -> None:
    """A server that fails once and then is well again: every text is what it would have been, or says why not."""
    with known(server, 4.0) as cloud:
        storm(server, (STORMS | LATER)[name], after=0 if plan == "cloud" else 1, num=1)
        generation = write(cloud, plan)
        try:
            generation.run()
        except SkydraftError as error:
            assert_one_clear_line(error)
            assert name in ("400", "401", "404") or plan != "gated"
            assert generation.token_ids == ALONE[: len(generation.token_ids)] or plan == "gated"
        else:
            assert len(generation.token_ids) == LENGTH
            assert plan == "gated" or generation.token_ids == ALONE
        assert_all_is_accounted_for(generation)
