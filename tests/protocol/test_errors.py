"""The error tree is complete; each class says how to exit, what to answer and whether to retry. Across the wire it has
one status, and comes back as itself, whatever the trailers hold.
"""

import importlib
import pkgutil
import random
import re
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

import skydraft
from skydraft import errors
from skydraft.engines.toy import open_toy
from skydraft.errors import OptionError, RateLimited, SkydraftError
from skydraft.protocol.status import from_rpc, to_status
from tests.mutating import flipped
from tests.serving import serving


def descendants(cls: type[SkydraftError]) -> list[type[SkydraftError]]:
    return [cls, *(found for child in cls.__subclasses__() for found in descendants(child))]


def test_every_error_is_in_the_drawing_and_maps_to_one_status_of_each_kind() -> None:
    for module in pkgutil.walk_packages(skydraft.__path__, "skydraft."):
        if "transformers" not in module.name:
            importlib.import_module(module.name)
    tree = [cls for cls in descendants(SkydraftError) if cls.__module__.startswith("skydraft")]
    assert {cls.__module__ for cls in tree} == {"skydraft.errors"}
    drawn = set(re.findall(r"^    (?:[│├└─ ]*)(\w+)", errors.__doc__ or "", re.M))
    assert drawn == {cls.__name__ for cls in tree}
    for cls in tree:
        assert cls.exit_status in (1, 2), cls
        assert cls.grpc_status in grpc.StatusCode.__members__, cls
        assert (cls.exit_status == 2) == issubclass(cls, errors.UsageError), cls


def test_the_public_names_are_what_can_be_imported() -> None:
    public = {name for name in vars(skydraft) if not name.startswith("_")}
    modules = {module.name for module in pkgutil.iter_modules(skydraft.__path__)}
    assert set(skydraft.__all__) == public - modules


def test_options_are_named_as_they_are_given() -> None:
    """By a flag on the command line, by its name in Python; a command that is to be run keeps its flags."""
    says, runs = "--max-new-tokens must be positive.", "Run: skydraft models fetch x --source pypi."
    error = OptionError(says, hint=f"{runs} Or pip install --no-deps x. To wait: --cloud-timeout, --cloud-key-file.")
    assert error.line == f"{says} {runs} Or pip install --no-deps x. To wait: --cloud-timeout, --cloud-key-file."
    expected = f"max_new_tokens must be positive. {runs} Or pip install --no-deps x. To wait: timeout_s, token."
    assert str(error) == f"{error.message} {error.hint}" == expected


KEY = "grpc-status-details-bin"
CLASSES = [kind for kind in descendants(SkydraftError) if kind.__module__ == "skydraft.errors"]


def ended(code: grpc.StatusCode, details: str | None = "", trailers: Iterable[Any] | None = ()) -> Any:
    """A call that has failed, as a client sees it."""
    return SimpleNamespace(code=lambda: code, details=lambda: details, trailing_metadata=lambda: trailers)


def failed(error: SkydraftError) -> Any:
    """The call that a server ended with this error."""
    status = to_status(error)
    return ended(status.code, status.details, status.trailing_metadata)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_comes_back_as_itself_whatever_becomes_of_its_trailers(kind: type[SkydraftError]) -> None:
    error = kind("「模型」 is not here.", hint="Look elsewhere.")
    status, back, rng = to_status(error), from_rpc(failed(error)), random.Random(5)
    assert isinstance(status.code, grpc.StatusCode) and status.code.name == kind.grpc_status
    assert type(back) is kind and str(back) == str(error) == status.details
    [(key, value)] = status.trailing_metadata
    for _ in range(60):
        damaged = from_rpc(ended(status.code, status.details, ((key, flipped(value, rng)),)))
        assert isinstance(damaged, SkydraftError)


BY_GRPC: dict[type[SkydraftError], list[str]] = {
    errors.CloudLost: ["UNAVAILABLE", "CANCELLED"],
    errors.CloudTimeout: ["DEADLINE_EXCEEDED"],
    errors.NotAuthorized: ["UNAUTHENTICATED", "PERMISSION_DENIED"],
    errors.LimitExceeded: ["RESOURCE_EXHAUSTED"],
    errors.ProtocolError: ["UNIMPLEMENTED"],
    errors.CloudFailure: ["INTERNAL", "UNKNOWN", "NOT_FOUND", "FAILED_PRECONDITION", "ABORTED", "DATA_LOSS"],
}


@pytest.mark.parametrize("trailers", [(), None, (("content-type", "text/html"),)])
@pytest.mark.parametrize("kind", BY_GRPC)
def test_a_status_that_grpc_made_becomes_what_it_means(kind: type[SkydraftError], trailers: Any) -> None:
    for code in BY_GRPC[kind]:
        error = from_rpc(ended(grpc.StatusCode[code], "the socket is gone", trailers))
        assert type(error) is kind and "the socket is gone" in str(error) and "\n" not in str(error)


def test_a_peer_of_another_version_is_refused_with_one_line_on_either_side() -> None:
    """The version is that of the noise, too: both sides must draw alike."""
    with serving(open_toy("toy")) as server, grpc.insecure_channel(server.address) as channel:
        old = channel.stream_stream("/skydraft.verifier.v2.Verifier/GetInfo")(iter([b""]))
        with pytest.raises(grpc.RpcError):
            next(old)
    error = from_rpc(old)
    assert "speaks no skydraft.verifier.v4" in str(error) and "one version of skydraft" in str(error)


def answered(*details: Any, code: int = 13, message: str = "text") -> Any:
    """An INTERNAL with these details; `code` and `message` are what stands in the trailer."""
    status = status_pb2.Status(code=code, message=message)
    for each in details:
        status.details.add().Pack(each)
    return ended(grpc.StatusCode.INTERNAL, "text", ((KEY, status.SerializeToString()),))


def info(reason: str, domain: str = "skydraft") -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=domain)


@pytest.mark.parametrize("rpc", [
    answered(), answered(info("DIVERGED", domain="googleapis.com")), answered(info("DIVERGED"), message="another"),
    answered(info("DIVERGED"), code=5),  # says NOT_FOUND inside of an INTERNAL
    *(answered(info(reason)) for reason in ("NO_SUCH_ERROR", "Diverged", "")),
])  # fmt: skip
def test_another_servers_details_are_no_error_of_ours(rpc: Any) -> None:
    assert type(from_rpc(rpc)) is errors.CloudFailure


@pytest.mark.parametrize("delay", [Duration(seconds=-5), Duration(seconds=2**62, nanos=-7), Duration(nanos=2**31 - 1)])
def test_how_long_to_wait_comes_with_an_error_and_nobody_waits_for_the_past(delay: Duration) -> None:
    for wait_s in (0.0, 0.001, 2**32 / 1e3):
        limited = from_rpc(failed(RateLimited("Too much.", retry_after_s=wait_s)))
        assert isinstance(limited, RateLimited) and limited.retry_after_s == pytest.approx(wait_s, abs=5e-4)
    error = from_rpc(answered(info("RATE_LIMITED"), error_details_pb2.RetryInfo(retry_delay=delay)))
    assert isinstance(error, RateLimited) and error.retry_after_s >= 0
