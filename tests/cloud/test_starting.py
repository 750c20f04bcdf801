"""A server listens before its model is loaded: calls get UNAVAILABLE and the reason."""

from __future__ import annotations

import socket

import grpc
import pytest

from skydraft.cloud.listening import starting
from skydraft.cloud.server import ServeOptions
from skydraft.errors import OptionError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def test_calls_learn_why_and_the_port_is_free_afterwards() -> None:
    options = ServeOptions(port=free_port())
    with starting(options), grpc.insecure_channel(f"127.0.0.1:{options.port}") as channel:
        for call in ("skydraft.verifier.v2.Verifier/GetInfo", "grpc.health.v1.Health/Check"):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(f"/{call}")(b"", timeout=20)
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert "its model loads" in refused.value.details()  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream("/skydraft.verifier.v2.Verifier/Session")(iter([b"a", b"b"]), timeout=20))
        assert "its model loads" in refused.value.details()  # type: ignore[attr-defined]
    with starting(options):  # which binds the port again
        pass


def test_a_taken_port_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ServeOptions(port=taken.getsockname()[1])
        with pytest.raises(OptionError, match="Cannot listen"), starting(options):
            pytest.fail("it was loaded")


def test_any_free_port_is_left_alone() -> None:
    with starting(ServeOptions(port=0)):
        pass
