"""Servers that are not ours and fail, lie or flood: a gated text goes on alone, any other ends with one clear line, and
no token is lost or doubled."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.edge.cloud import Cloud
from skydraft.edge.stock.meeting import Met
from skydraft.engines.toy import ToyEngine, character_vocab, open_toy
from skydraft.errors import SkydraftError, VocabularyMismatch
from tests.serving import PATIENCE_S
from tests.stock import faults
from tests.stock.fakes import GENERATING, Fake, fake
from tests.stock.faults import Fault
from tests.toys import law

TEXT, LENGTH = "语速", 40
PARAMS = DecodingParams(max_new_tokens=LENGTH)
DIALECTS = ["vllm", "llama-server", "sglang"]
PLANS = {
    "gated": make_plan(gate="entropy:0.3", k=4),
    "cloud": make_plan("cloud"),
    "checked": make_plan(gate="always", k=4),
}


def letters(spec: str) -> ToyEngine:
    """A toy that writes no bare bytes: its text is cut into its tokens in one way only."""
    engine = open_toy(spec)
    single = [token_id for token_id, piece in enumerate(engine.vocab.pieces) if len(piece) == 1]
    engine._by_last[:, single[-256:]] = -1e3
    return engine


TARGET, DRAFT = letters("toy"), letters("toy:drift=0.2")
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


def write(cloud: Any, plan: str, *, raw: bool = True) -> Generation:
    execution: Any = {"execution": "throughput"} if plan == "checked" else {}
    return skydraft.generate(
        TEXT, edge=DRAFT, cloud=cloud, plan=PLANS[plan], params=PARAMS, raw=raw, **execution
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


CASES = [(dialect, name) for name in STORMS for dialect in DIALECTS if dialect == "vllm" or "ids" in name]
WIRED = ["500", "401", "a page", "null", "a list", "gigabytes of events", "a gzip bomb", "silence"]


@pytest.mark.parametrize(("dialect", "name"), CASES)
def test_a_gated_text_goes_on_alone(line: tuple[Fake, Cloud], dialect: str, name: str, way: str) -> None:
    if way == "checks" and (dialect == "llama-server" or (dialect == "sglang" and "ids" in name)):
        pytest.skip("llama-server is not asked so, and what SGLang says then is the prompt's own ids")
    server, cloud = line
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
            assert plan != "gated" or name in ("400", "401", "404")
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
        storm(server, (STORMS | LATER)[name], after=0 if plan == "cloud" else 2)
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


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_is_slow_and_well_is_not_taken_for_lost(
    lines: dict[str, tuple[Fake, Cloud]], dialect: str, way: str
) -> None:
    """Each token takes longer than a silence may last. (SGLang's /health takes a second by itself.)"""
    server, _ = lines[dialect]
    server.fault_of = lambda path: None
    with known(server, PATIENCE_S) as cloud:
        server.dialect.token_s = 1.3
        generation = write(cloud, "gated")
        try:
            tokens = iter(generation)
            while not set(generation.origins) & {"accepted", "recovered", "edge-fallback"}:
                next(tokens)
        finally:
            server.dialect.token_s = 0.0
            generation.close()
        assert "edge-fallback" not in generation.origins
        assert_all_is_accounted_for(generation)


def test_a_storm_is_not_answered_by_a_storm() -> None:
    """A server that says when to come back is not asked before."""
    with fake("vllm", TARGET) as server, known(server, 2.5) as cloud:
        storm(server, faults.refuses(429, Retry_After="1"), after=0)
        before = len(server.model.asked)
        with pytest.raises(SkydraftError):
            write(cloud, "cloud").run()
        assert 2 <= sum(asked.path in GENERATING for asked in server.model.asked[before:]) <= 4


# --- Kills


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_is_killed_and_comes_back_costs_no_token(dialect: str) -> None:
    """A text that is always verified waits for it; what it wrote until then is not asked again."""
    with fake(dialect, TARGET, token_s=0.01) as server, known(server, PATIENCE_S) as cloud:
        generation = write(cloud, "cloud")
        tokens = iter(generation)
        for _ in range(LENGTH // 4):
            next(tokens)
        server.kill()
        back = threading.Timer(0.5, server.start)
        back.start()
        for _ in tokens:
            pass
        back.join()
        assert generation.token_ids == ALONE


def test_a_gated_text_comes_back_to_a_server_that_is_back() -> None:
    with fake("vllm", TARGET, token_s=0.005) as server, known(server, PATIENCE_S) as cloud:
        params = DecodingParams(max_new_tokens=400)
        generation = skydraft.generate(
            TEXT, edge=DRAFT, cloud=cloud, plan=PLANS["gated"], params=params, raw=True
        )  # fmt: skip
        tokens = iter(generation)
        for _ in range(30):
            next(tokens)
        server.kill()
        while "edge-fallback" not in generation.origins:
            next(tokens)
        server.start()
        for _ in tokens:
            time.sleep(0.005)
            if generation.origins[-1] in ("accepted", "recovered", "bonus"):
                break
        else:
            raise AssertionError("it never came back")
        assert_all_is_accounted_for(generation)
        generation.close()


@pytest.mark.parametrize("plan", ["gated", "cloud"])
def test_a_server_that_comes_back_as_another_model_writes_no_token_of_the_text(plan: str) -> None:
    with fake("vllm", TARGET, token_s=0.01) as server, known(server, 5.0) as cloud:
        generation = write(cloud, plan)
        tokens = iter(generation)
        for _ in range(LENGTH // 4):
            next(tokens)
        server.kill()
        server.become(letters("toy:drift=0.9"), "other")
        server.start()
        try:
            for _ in tokens:
                pass
        except SkydraftError as error:
            assert_one_clear_line(error)
            assert "other" in str(error)
        else:
            assert plan == "gated"
        assert_all_is_accounted_for(generation)


@pytest.mark.long
def test_a_hundred_generations_under_kills_lose_and_double_no_token() -> None:
    """Servers of three kinds that are killed at random moments and come back, under gated texts and streams."""
    chance, num_tokens, num_kills = random.Random(26), 0, 0
    for number in range(100):
        dialect, plan = DIALECTS[number % 3], ("cloud", "gated")[number % 2]
        with fake(dialect, TARGET, token_s=0.004) as server, known(server, PATIENCE_S) as cloud:
            generation = write(cloud, plan)
            tokens = iter(generation)
            for _ in range(chance.randrange(LENGTH)):
                if next(tokens, None) is None:
                    break
            server.kill()
            back = threading.Timer(chance.uniform(0.05, 0.6), server.start)
            back.start()
            for _ in tokens:
                pass
            back.join()
            num_kills, num_tokens = num_kills + 1, num_tokens + len(generation.token_ids)
            if plan == "cloud":
                assert generation.token_ids == ALONE
            else:
                assert_all_is_accounted_for(generation)
    print(f"{num_kills} kills, {num_tokens} tokens")
    assert num_tokens > 2000
