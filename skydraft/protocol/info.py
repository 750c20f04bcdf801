"""The GetInfo reply of a server, to bytes and back."""

from __future__ import annotations

from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import decoder, encoder
from skydraft.protocol.values import ServerInfo

_EXECUTIONS: dict[str, pb.Execution] = {"exact": pb.EXECUTION_EXACT, "throughput": pb.EXECUTION_THROUGHPUT}


@encoder
def encode_info(info: ServerInfo) -> pb.GetInfoReply:
    """Bytes of a GetInfoReply."""
    message = pb.GetInfoReply(
        fingerprint=bytes.fromhex(info.fingerprint),
        execution=_EXECUTIONS[info.execution],
        forward_us=[round(ms * 1e3) for ms in info.forward_ms],
    )
    for name in _INFO_NAMES:
        setattr(message, name, getattr(info, name))
    return message


_INFO_NAMES = (
    "version",
    "model",
    "vocab_size",
    "context_len",
    "max_rows",
    "max_block",
    "max_sessions",
    "num_sessions",
    "invariant_rows",
    "weights",
)


@decoder(pb.GetInfoReply)
def decode_info(message: pb.GetInfoReply) -> ServerInfo:
    """The value of a GetInfoReply."""
    executions = {number: name for name, number in _EXECUTIONS.items()}
    sizes = message.vocab_size, message.context_len, message.max_rows, message.max_block, message.max_sessions
    if min(*sizes, *message.forward_us, len(message.forward_us)) < 1:
        raise ValueError("a size or a time is 0")
    return ServerInfo(
        fingerprint=message.fingerprint.hex(),
        execution=executions[message.execution],  # type: ignore[arg-type]  # keys of a table of literals
        forward_ms=tuple(us / 1e3 for us in message.forward_us),
        **{name: getattr(message, name) for name in _INFO_NAMES},
    )
