"""Traces: one across the device, the server and whoever asked; no text in it; nothing of it unless asked for."""

from __future__ import annotations

import dataclasses
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import grpc
import httpx2 as httpx
import numpy as np
import pytest

import skydraft
from skydraft.cloud.server import ServeOptions
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.traced import TraceObserver
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError, UsageError
from skydraft.prompts.messages import asked
from skydraft.protocol import codec
from skydraft.protocol.values import OpenCall, Opening, VerifyCall
from skydraft.tracing import Tracing, check_collector, is_traceparent
from skydraft.types import Prompt

from .gateway.running import gateway, toy_pair
from .serving import RawSession, free_port, serving

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

OUTER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE_ID = bytes.fromhex(OUTER[3:35])
PROMPT = "一段谁也不该在别处读到的话"


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP, and keeps the spans."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        """(service, span) of all that arrived."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                found += [(service, span) for scope in resource.scope_spans for span in scope.spans]
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.path == "/v1/traces" and isinstance(self.server, Collector)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.bodies.append(body)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def collecting() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def traced(collector: Collector, max_new_tokens: int = 4, **given: Any) -> Iterator[skydraft.Generation]:
    """A generation of a device alone, whose trace goes to the collector."""
    params = skydraft.DecodingParams(max_new_tokens=max_new_tokens, **given)
    request = GenerateRequest(asked("你好"), make_plan("edge"), params)
    with (
        closing(Tracing("device", collector.url)) as tracing,
        skydraft.start(request, edge=open_toy("toy"), observers=[TraceObserver(tracing)]) as generation,
    ):
        yield generation


def figures(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.usefixtures("fixed_k")
@pytest.mark.parametrize("mode", ["lossless", "quality", "cloud"])
def test_a_trace_goes_from_the_device_to_the_server(mode: str) -> None:
    request = GenerateRequest(
        asked(PROMPT), make_plan(mode), skydraft.DecodingParams(max_new_tokens=24), traceparent=OUTER
    )
    edge = open_toy("toy:drift=0.2")
    with collecting() as collector:
        with (
            serving(open_toy("toy"), otlp=collector.url) as server,
            closing(skydraft.connect(server.address)) as cloud,
            closing(Tracing("device", collector.url)) as tracing,
            skydraft.start(request, edge=edge, cloud=cloud, observers=[TraceObserver(tracing)]) as generation,
        ):
            generation.run()
        spans = collector.spans()
        assert all(PROMPT.encode() not in body and generation.text.encode() not in body for body in collector.bodies)
    assert {span.trace_id for _, span in spans} == {TRACE_ID}
    (whole,) = [span for _, span in spans if span.name == "generate" and span.parent_span_id.hex() == OUTER[36:52]]
    stats = generation.stats
    assert figures(whole)["gen_ai.usage.output_tokens"] == stats.num_tokens
    assert figures(whole)["skydraft.mode"] == mode
    assert figures(whole)["skydraft.hand_back"] == ("agree:4" if mode == "quality" else "0")
    rounds = [span for service, span in spans if service == "device" and span.name == "round"]
    assert len(rounds) == stats.num_rounds
    assert all(whole.start_time_unix_nano <= span.start_time_unix_nano for span in rounds)
    assert all(span.end_time_unix_nano <= whole.end_time_unix_nano for span in rounds)
    assert {span.parent_span_id for span in rounds} == {whole.span_id}
    served = [span for service, span in spans if service == "skydraft-serve"]
    assert {span.parent_span_id for span in served} == {whole.span_id}
    verified = {figures(span)["skydraft.base"] for span in served if span.name == "verify"}
    judged = {figures(s)["skydraft.base"] for s in rounds if figures(s)["skydraft.outcome"] == "verified"}
    if mode == "cloud":
        assert [span.name for span in served] == ["verify"] and verified == {0}
        assert figures(served[0])["skydraft.num_tokens"] == stats.num_tokens
    else:
        assert verified == judged != set()


def test_a_trace_says_that_costs_decide_the_hand_back() -> None:
    request = GenerateRequest(asked("你好"), make_plan("lossless"), skydraft.DecodingParams(max_new_tokens=4))
    with collecting() as collector:
        with (
            closing(Tracing("device", collector.url)) as tracing,
            skydraft.start(
                request, edge=open_toy("toy:drift=0.2"), cloud=open_toy("toy"), observers=[TraceObserver(tracing)]
            ) as generation,
        ):
            generation.run()
        (whole,) = [span for _, span in collector.spans() if span.name == "generate"]
    assert (figures(whole)["skydraft.k"], figures(whole)["skydraft.hand_back"]) == ("auto", "auto")


def test_a_trace_ends_where_another_one_begins() -> None:
    """One connection, three generations: with a trace, without one, and with one again."""
    edge = open_toy("toy:drift=0.2")
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server, closing(skydraft.connect(server.address)) as cloud:
            for header in (OUTER, "", OUTER.replace("0af7", "1bf8")):
                params = skydraft.DecodingParams(max_new_tokens=8)
                request = GenerateRequest(asked("你好"), make_plan("lossless"), params, traceparent=header)
                with skydraft.start(request, edge=edge, cloud=cloud) as generation:
                    generation.run()
        ids = [span.trace_id for _, span in collector.spans()]
    assert set(ids) == {TRACE_ID, bytes.fromhex(OUTER[3:35].replace("0af7", "1bf8"))}
    assert ids.count(TRACE_ID) == len(ids) / 2  # that in the middle left none


def test_a_failure_is_in_the_trace_without_its_words_and_passes() -> None:
    with collecting() as collector:
        with pytest.raises(UsageError, match=PROMPT), traced(collector, grammar=f"regex:({PROMPT}") as generation:
            generation.run()
        ((_, span),) = collector.spans()
        assert all(PROMPT.encode() not in body for body in collector.bodies)
    assert span.status.code == span.status.STATUS_CODE_ERROR and figures(span)["error.type"] == "GrammarRefused"


@pytest.mark.parametrize("breaks_off", [False, True])
def test_whoever_leaves_a_text_has_not_failed(breaks_off: bool) -> None:
    params = skydraft.DecodingParams(max_new_tokens=3500, min_new_tokens=3500)
    request = GenerateRequest(asked("你好"), make_plan("cloud"), params, traceparent=OUTER)
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server:
            if breaks_off:
                opening = Opening(server.server.info().fingerprint, Prompt((1,)), params=params)
                call = VerifyCall(1, 0, 0, (), (), codec.digest(np.array([1])), opening, write=3500)
                with grpc.insecure_channel(server.address) as channel:
                    stream = RawSession(channel, traceparent=OUTER)
                    assert all((stream.ask(codec.encode_verify(call)), *(stream.answer() for _ in range(6))))
                    stream.end()
            else:
                with (
                    closing(skydraft.connect(server.address)) as cloud,
                    skydraft.start(request, edge=open_toy("toy"), cloud=cloud) as generation,
                ):
                    assert len([None for _, _ in zip(generation, range(6), strict=False)]) == 6
        (span,) = [span for _, span in collector.spans()]
    assert span.name == "verify" and not span.status.code
    assert figures(span).get("skydraft.left", False) is breaks_off
    assert 6 <= figures(span)["skydraft.num_tokens"] < 3500


def test_the_gateway_takes_a_client_s_trace() -> None:
    with collecting() as collector, closing(Tracing("gateway", collector.url)) as tracing:
        pair = dataclasses.replace(toy_pair(), observers=(TraceObserver(tracing),))
        with gateway(pair) as running:
            for header in (OUTER, "00-nonsense", OUTER + "\u00e9"):
                body = {"model": "skydraft", "messages": [{"role": "user", "content": "你好"}], "max_tokens": 4}
                headers = {b"traceparent": header.encode("latin-1")}
                answer = httpx.post(f"{running.v1}/chat/completions", json=body, headers=headers, timeout=30)
                assert answer.status_code == 200
        tracing.close()
        whole = [span for _, span in collector.spans() if span.name == "generate"]
    assert [span.trace_id == TRACE_ID for span in whole] == [True, False, False]


@pytest.mark.parametrize("answers", [True, False])
def test_a_collector_that_is_gone_or_silent_costs_one_line_and_no_answer(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skydraft.tracing._SEND_S", 0.3)
    lines: list[str] = []
    request = GenerateRequest(asked("你好"), make_plan("edge"), skydraft.DecodingParams(max_new_tokens=400))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = free_port() if answers else silent.getsockname()[1]
        tracing = Tracing("device", f"http://me:secret@127.0.0.1:{port}", lines.append)
        for _ in range(3):
            with skydraft.start(request, edge=open_toy("toy"), observers=[TraceObserver(tracing)]) as generation:
                assert generation.run().finish_reason
        began = time.monotonic()
        tracing.close()
        assert time.monotonic() - began < 5  # three batches, each waited for, and then the library's own thread
    (line,) = lines
    assert line.startswith(f"Traces cannot be sent to http://127.0.0.1:{port}; they are lost.") and "secret" not in line


def test_a_long_text_has_spans_of_its_first_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.decoding.traced._MAX_ROUNDS", 3)
    with collecting() as collector:
        with traced(collector, 40, min_new_tokens=40) as generation:
            generation.run()
        spans = [span for _, span in collector.spans()]
    assert [span.name for span in spans].count("round") == 3
    left_out = figures(next(span for span in spans if span.name == "generate"))["skydraft.num_rounds_left_out"]
    assert left_out == generation.stats.num_rounds - 3


def test_a_trace_that_cannot_be_made_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.decoding.traced._figures", lambda record: 1 / 0)
    lines: list[str] = []
    request = GenerateRequest(asked("你好"), make_plan("edge"), skydraft.DecodingParams(max_new_tokens=4))
    with (
        collecting() as collector,
        closing(Tracing("device", collector.url, lines.append)) as tracing,
        skydraft.start(request, edge=open_toy("toy"), observers=[TraceObserver(tracing)]) as generation,
    ):
        assert generation.run().finish_reason
    assert len(lines) == 1


def test_the_standard_s_variables_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        for name, value in (("OTEL_SERVICE_NAME", "kitchen"), ("OTEL_SDK_DISABLED", "true")):
            monkeypatch.setenv(name, value)
            with traced(collector) as generation:
                assert generation.run().finish_reason
        assert {service for service, _ in collector.spans()} == {"kitchen"}


def test_a_header_that_is_none_makes_no_span_on_the_server() -> None:
    with collecting() as collector:
        with serving(open_toy("toy"), otlp=collector.url) as server, grpc.insecure_channel(server.address) as channel:
            for header in ("zzzz", OUTER):
                stream = RawSession(channel, traceparent=header)
                stream.ask(codec.encode_open(OpenCall(1, 0, Opening(server.server.info().fingerprint, Prompt((1,))))))
                stream.end()
        assert [span.trace_id for _, span in collector.spans()] == [TRACE_ID]


def test_a_command_belongs_to_the_trace_in_the_environment_and_a_gateway_to_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from skydraft.cli import gateway as command
    from skydraft.cli.main import run

    monkeypatch.setenv("TRACEPARENT", OUTER)
    seen: list[Any] = []
    monkeypatch.setattr(command, "_open", lambda work, cloud, models, keep, stack: seen.append(keep) or 1 / 0)
    with collecting() as collector:
        where = ["--otlp", collector.url, "--edge-model", "toy"]
        assert run(["generate", "你好", "--mode", "edge", "-n", "4", "-q", *where]) == 0
        assert {(service, span.trace_id) for service, span in collector.spans()} == {("skydraft-generate", TRACE_ID)}
        with pytest.raises(ZeroDivisionError):
            run(["gateway", *where])
        assert seen[0].observers[0]._parent == ""


NO_ADDRESSES = (
    "localhost:4318", "file:///tmp/x", "http://", "", "http://[::1", "http://a:b", "http://a:99999", "http://a:0",
)  # fmt: skip


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_an_address_that_is_none_is_one_line(url: str) -> None:
    with pytest.raises(OptionError, match="not the address of a collector"):
        Tracing("device", url)
    with pytest.raises(OptionError, match="not the address of a collector"):
        ServeOptions(otlp=url)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces", "/v1/traces/"])
def test_spans_are_posted_where_the_protocol_has_it(path: str) -> None:
    assert check_collector(f"https://a/otlp{path}") == "https://a/otlp/v1/traces"


@pytest.mark.parametrize(
    ("header", "is_one"),
    [
        (OUTER, True), (OUTER.upper(), False), (OUTER + "\n", False), ("ff" + OUTER[2:], False), ("", False),
        (OUTER.replace("b7ad6b7169203331", "0" * 16), False), (OUTER.replace(OUTER[3:35], "0" * 32), False),
    ],
)  # fmt: skip
def test_headers(header: str, is_one: bool) -> None:
    assert is_traceparent(header) is is_one
    if header and not is_one:
        with pytest.raises(OptionError, match="not a traceparent"):
            GenerateRequest(asked("你好"), traceparent=header)
