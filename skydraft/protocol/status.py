"""Errors on the wire: each error class has one gRPC status, which decodes to the same class."""

import re
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

import skydraft.errors as errors
from skydraft.characters import one_line
from skydraft.errors import SkydraftError
from skydraft.protocol.values import SERVICE

_DOMAIN = "skydraft"
# Statuses of gRPC itself or of other servers, without one of our errors.
_BY_CODE: dict[grpc.StatusCode, type[SkydraftError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.CloudTimeout,
    grpc.StatusCode.CANCELLED: errors.CloudLost,
    grpc.StatusCode.UNAUTHENTICATED: errors.NotAuthorized,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotAuthorized,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,  # gRPC's own: a message larger than allowed
}
# gRPC's messages about connections that a retry cannot repair.
_TLS = {
    "Hostname Verification": ("The server's certificate names another host.",
                              "Give the certificate's name with --tls-name, or connect to that host."),
    "CERTIFICATE_VERIFY_FAILED": ("This machine trusts no signer of the server's certificate, or it has expired.",
                                  "Give the certificate that signed it with --tls-ca."),
    "WRONG_VERSION_NUMBER": ("The server speaks no TLS.",
                             "Check the port; without encryption, leave out --tls-ca or give --insecure."),
    "security handshaker": ("No encrypted connection can be made.", "Check the file given with --tls-ca."),
}  # fmt: skip


def _tree(kind: type[SkydraftError]) -> list[type[SkydraftError]]:
    return [kind, *(each for child in kind.__subclasses__() for each in _tree(child))]


def _reason(kind: type[SkydraftError]) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()


_BY_REASON = {_reason(kind): kind for kind in _tree(SkydraftError)}


def to_status(error: SkydraftError) -> Any:
    info = error_details_pb2.ErrorInfo(reason=_reason(type(error)), domain=_DOMAIN)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.grpc_status), message=error.line)
    status.details.add().Pack(info)
    if isinstance(error, errors.RateLimited):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1e3))
        status.details.add().Pack(retry)
    return rpc_status.to_status(status)


def from_rpc(rpc: Any) -> SkydraftError:
    """Return the error for a grpc.RpcError that is also a grpc.Call. Its text becomes one line without control
    characters."""
    text = one_line(rpc.details() or "") or "no reason given"
    info, delay_s = _details(rpc)
    kind = _BY_REASON.get(info.reason) if info.domain == _DOMAIN else None
    if kind is errors.RateLimited:
        return errors.RateLimited(text, retry_after_s=delay_s)
    if kind is not None:
        return kind(text)
    code = rpc.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        for sign, (message, hint) in _TLS.items():
            if sign in text:
                return errors.TlsFailure(message, hint=hint)
        return errors.CloudLost(f"no connection: {text.rsplit(': ', 1)[-1].rstrip('.]')}.")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        hint = "Use one version of skydraft on both sides."
        return errors.ProtocolError(f"The server speaks no {SERVICE}: {text.rstrip('.')}.", hint=hint)
    return _BY_CODE.get(code, errors.CloudFailure)(f"The cloud answered {code.name}: {text.rstrip('.')}.")


def _details(rpc: Any) -> tuple[error_details_pb2.ErrorInfo, float]:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(rpc)
        for detail in status.details if status else ():
            detail.Unpack(info) or detail.Unpack(retry)
    except (ValueError, DecodeError):  # a malformed status in the trailers
        pass
    return info, max(retry.retry_delay.ToMilliseconds(), 0) / 1e3
