"""What whoever runs a server sets and sees: its start, tokens, certificates, addresses, health, metrics and logs."""

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

import skydraft
from skydraft import make_plan
from skydraft.access.limits import Limits
from skydraft.cloud.calls import abort
from skydraft.cloud.logs import JsonLines, log_to_stderr
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.server import serve
from skydraft.cloud.service import Calls
from skydraft.cloud.worker import Worker
from skydraft.edge.tls import ServerOptions
from skydraft.engines.toy import open_toy
from skydraft.errors import CloudError, EngineError, NotAuthorized, OptionError, SkydraftError, TlsFailure
from skydraft.protocol import codec
from skydraft.protocol.values import GET_INFO, HEALTH, SERVICE, SESSION

from ..serving import PATIENCE_S, RawSession, Serving, certified, free_port, serving
from ..stock.fakes import fake
from .driver import ANN, BOB, PARAMS, assert_serves, open_message, opening, verify_message


def ends_with(channel: grpc.Channel, path: str = HEALTH) -> tuple[grpc.StatusCode, str]:
    """Status and details of a call."""
    call = channel.stream_stream(path)(iter([b""]), timeout=PATIENCE_S)
    with suppress(grpc.RpcError):
        list(call)
    return call.code(), str(call.details())


@contextmanager
def signals_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def toy() -> Worker:
    return Worker(open_toy("toy"), Limits())


def test_calls_wait_for_the_model_on_connections_that_stay() -> None:
    options = ServeOptions(port=free_port(), grace_s=0.0)
    told: list[Any] = []
    with signals_as_before(), grpc.insecure_channel(f"127.0.0.1:{options.port}") as channel:
        states: list[grpc.ChannelConnectivity] = []

        def load() -> Worker:
            for path in (HEALTH, GET_INFO, SESSION):
                code, details = ends_with(channel, path)
                assert code is grpc.StatusCode.UNAVAILABLE and "its model loads" in details
            channel.subscribe(states.append)
            return toy()

        def asked() -> None:
            try:
                told.append(ends_with(channel)[0])
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # to the server, which runs in the main thread

        serve(load, options, lambda worker, port: threading.Thread(target=asked).start())
    assert told == [grpc.StatusCode.OK]
    assert grpc.ChannelConnectivity.CONNECTING not in states  # it never had to connect again


def loads_nothing() -> Any:
    pytest.fail("it was loaded")


def test_what_is_wrong_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    for name in ("tokens", "cert.pem"):
        (tmp_path / name).write_text("nothing\n")
    cert, missing = tmp_path / "cert.pem", tmp_path / "no"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused: list[tuple[dict[str, Any], str]] = [
            ({"port": taken.getsockname()[1]}, r"Cannot listen on 127.0.0.1:\d+: Address already in use\."),
            ({"port": 0, "token_file": tmp_path / "tokens"}, "LABEL TOKEN"),
            ({"port": 0, "tls_cert": cert, "tls_key": cert}, "cannot be used"),
            ({"port": 0, "tls_cert": missing, "tls_key": missing}, "cannot be used"),
        ]
        for options, says in refused:
            with signals_as_before(), pytest.raises(OptionError, match=says):
                serve(loads_nothing, ServeOptions(**options), print)


def test_a_port_that_is_taken_at_one_address_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC would listen at the other address alone, and clients would reach somebody else."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("127.0.0.2", "10.255.255.1"):  # another of this machine, and one that is not of this machine
            both = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in (name, "127.0.0.1")]
            monkeypatch.setattr("skydraft.cloud.listening.socket.getaddrinfo", lambda *_, found=both, **__: found)
            with pytest.raises(OptionError, match="Address already in use"):
                serve(loads_nothing, ServeOptions(host="localhost", port=port), print)


def no_model() -> Any:
    raise EngineError("no such model")


def ended_by_a_signal() -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("load", "error"), [
    (no_model, EngineError), (ended_by_a_signal, KeyboardInterrupt), (toy, OptionError)  # its port of metrics is taken
])  # fmt: skip
def test_whatever_keeps_a_server_from_starting_frees_the_port(load: Any, error: type[BaseException]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(port=free_port(), metrics_port=taken.getsockname()[1])
        with signals_as_before(), pytest.raises(error, match="Metrics cannot be served" if load is toy else None):
            serve(load, options, print)
    socket.create_server(("127.0.0.1", options.port)).close()


def test_a_server_whose_worker_dies_ends_at_once_and_says_so() -> None:
    def on_ready(worker: Worker, port: int) -> None:
        worker.post(lambda: worker.step(1))  # type: ignore[call-arg]

    with signals_as_before(), pytest.raises(EngineError, match="worker thread failed"):
        serve(toy, ServeOptions(port=0, grace_s=PATIENCE_S), on_ready)


def test_tokens_are_wanted_by_every_method_but_not_for_health(token_file: Path) -> None:
    with serving(open_toy("toy"), token_file=token_file) as server, grpc.insecure_channel(server.address) as channel:
        for token in ("", "wrong-token-of-24-characters", ANN[:-1], "!"):
            for message in (verify_message(), open_message(), codec.encode_close(7)):
                with pytest.raises(NotAuthorized):
                    RawSession(channel, token).ask(message)
            with pytest.raises(NotAuthorized), closing(skydraft.connect(server.address, token=token or None)) as cloud:
                cloud.info()
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        with closing(skydraft.connect(server.address, token=ANN)) as cloud:
            assert cloud.info().model == "toy"


def test_a_certificate_is_checked_and_the_bytes_are_encrypted(tmp_path: Path) -> None:
    files, ca = certified(tmp_path)
    with serving(open_toy("toy"), **files) as server:
        assert_serves(server.address, tls_ca=ca)
        strangers: list[tuple[dict[str, Any], str]] = [
            ({}, "If it wants TLS, give tls_ca"),
            ({"tls_ca": trustme.CA().cert_pem.bytes()}, "trusts no signer.*tls_ca"),
            ({"tls_ca": ca, "tls_name": "elsewhere"}, "names another host.*tls_name"),
        ]
        for options, says in strangers:
            with closing(skydraft.connect(server.address, **options)) as stranger:
                began = time.monotonic()
                with pytest.raises(CloudError, match=says):
                    given = {"cloud": stranger, "plan": make_plan("quality")}
                    skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), **given).run()
                assert time.monotonic() - began < 5  # not the 30 seconds of somebody who is away
    with serving(open_toy("toy")) as server, pytest.raises(TlsFailure, match=r"speaks no TLS.*insecure"):
        skydraft.connect(server.address, tls_ca=ca).info()
    with pytest.raises(OptionError, match="not a certificate in PEM form"):
        skydraft.connect("localhost:1", tls_ca=b"nonsense")


@pytest.mark.parametrize("mode", ["quality", "lossless"])
def test_an_address_of_a_server_of_another_kind_needs_http(mode: str) -> None:
    """A gated text went on alone, and others waited."""
    with fake("llama-server") as server, closing(skydraft.connect(server.url.removeprefix("http://"))) as cloud:
        began = time.monotonic()
        with pytest.raises(OptionError, match=f"does not speak skydraft's protocol.*its address is {server.url}"):
            skydraft.generate("语速", edge=open_toy("toy:drift=0.2"), cloud=cloud, plan=make_plan(mode)).run()
        assert time.monotonic() - began < 5


def test_plaintext_beyond_this_machine_has_to_be_asked_for() -> None:
    for host in ("0.0.0.0", "192.168.1.2", "cloud.example", "::"):
        with pytest.raises(OptionError, match="unencrypted"):
            ServeOptions(host=host)
        assert ServeOptions(host=host, insecure=True)
    for host in ("127.0.0.1", "localhost", "::1"):
        assert ServeOptions(host=host)
    assert [ServerOptions(host).uses_tls for host in ("localhost:1", "cloud.example:1")] == [False, True]


def test_metrics_have_the_names_of_the_field_and_count_what_happened() -> None:
    with serving(open_toy("toy"), metrics_port=free_port()) as server:
        with closing(skydraft.connect(server.address)) as cloud:
            edge, plan = open_toy("toy:drift=0.2"), make_plan(k=5)
            stats = skydraft.generate("语速", edge=edge, cloud=cloud, plan=plan, params=PARAMS).run().stats
        counts = {"drafts": stats.num_escalated, "draft_tokens": stats.num_draft_tokens}
        counts |= {"accepted_tokens": stats.num_accepted_tokens}
        expected = {f'spec_decode_num_{name}_total{{model="toy"}}': num for name, num in counts.items()}
        expected |= {'generated_tokens_total{model="toy"}': stats.num_tokens, "sessions_evicted": 0}
        expected |= {"batch_rows_sum": stats.num_draft_tokens + stats.num_escalated}
        assert {name: server.metric(name) for name in expected} == expected
        assert server.metric("batch_rows_count") == server.metric("forward_seconds_count") >= stats.num_escalated
        assert server.metric("forward_seconds_sum") > 0


def test_each_call_is_counted_once_with_what_became_of_it(token_file: Path) -> None:
    """Refusals too, whoever refuses."""
    limits = {"metrics_port": free_port(), "rows_per_s": 20.0}
    with serving(open_toy("toy"), token_file=token_file, **limits) as server:
        with grpc.insecure_channel(server.address) as channel:
            for message in (open_message(1), verify_message(2, opening=opening(*[1] * 70))):
                (stream := RawSession(channel, ANN)).ask(message)
                stream.send(codec.encode_close(0))
                assert not list(stream.call)
            for token, message in (
                ("nobody", verify_message()), (ANN, b"\xff"), (ANN, verify_message(3)),
                (ANN, verify_message(draft=(5,) * 40)), (ANN, open_message(1, opening(*[1] * 4096))),
            ):  # fmt: skip
                with pytest.raises(SkydraftError):
                    RawSession(channel, token).ask(message)
        for known in (BOB, None):
            with closing(skydraft.connect(server.address, token=known)) as cloud, suppress(NotAuthorized):
                cloud.info()
        sessions = {"NotAuthorized": 1, "LimitExceeded": 2, "ProtocolError": 1, "RateLimited": 1, "ok": 2}
        counted = {f'{{method="Session",outcome="{name}"}}': num for name, num in sessions.items()}
        counted |= {f'{{method="GetInfo",outcome="{name}"}}': 1 for name in ("ok", "NotAuthorized")}
        server.wait_until(lambda: server.metrics("calls_total") == counted)


def test_logs_are_json_with_session_and_label_not_prompts(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "skydraft.cloud"):
        assert_serves(server.address)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    rounds = [line for line in lines if line["event"] == "verify"]
    assert rounds and all({"session", "round", "token", "time", "level"} <= line.keys() for line in rounds)
    assert not any("prompt" in key for line in lines for key in line)


def test_a_line_of_the_log_is_written_once(monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any) -> None:
    for logger, part in product(map(logging.getLogger, ("skydraft", "grpc")), ("handlers", "propagate", "level")):
        monkeypatch.setattr(logger, part, getattr(logger, part))
    log_to_stderr("info")
    logging.getLogger("skydraft.cloud").info("news")
    assert caplog.messages == [] and capsys.readouterr().err.count("news") == 1


def test_a_client_that_leaves_just_before_its_call_ends_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """Else gRPC logs a traceback if it learns of that a moment later."""
    Calls()
    gone = grpc.aio.InternalError("Failed to execute a batch.")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(abort(AsyncMock(), gone))
    for error in (gone, ValueError("news")):
        logging.getLogger("grpc._cython.cygrpc").error("A method failed: %s.", error, exc_info=error)
    assert caplog.messages == ["A method failed: news."]


@pytest.mark.parametrize("session_ttl_s", [1e18, 2.2e6])
def test_limits_beyond_what_grpc_counts_are_limits(session_ttl_s: float) -> None:
    with serving(open_toy("toy"), session_ttl_s=session_ttl_s) as server:
        assert_serves(server.address)
