"""The GetInfo reply of a server, to bytes and back."""

from __future__ import annotations

from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import reading, sending
from skydraft.protocol.values import ServerInfo

_EXECUTIONS: dict[str, pb.Execution] = {"exact": pb.EXECUTION_EXACT, "throughput": pb.EXECUTION_THROUGHPUT}
_EXECUTION_OF = {number: name for name, number in _EXECUTIONS.items()}
_AS_THEY_ARE = (
    "version", "model", "vocab_size", "context_len", "max_rows", "max_block", "max_sessions", "num_sessions",
    "invariant_rows", "weights",
)  # fmt: skip


@sending()
def encode_info(info: ServerInfo) -> bytes:
    return pb.GetInfoReply(
        fingerprint=bytes.fromhex(info.fingerprint),
        execution=_EXECUTIONS[info.execution],
        forward_us=[round(ms * 1e3) for ms in info.forward_ms],
        **{name: getattr(info, name) for name in _AS_THEY_ARE},
    ).SerializeToString()


@reading("GetInfoReply")
def decode_info(data: bytes) -> ServerInfo:
    message = pb.GetInfoReply.FromString(data)
    sizes = message.vocab_size, message.context_len, message.max_rows, message.max_block, message.max_sessions
    if min(*sizes, *message.forward_us, len(message.forward_us)) < 1:
        raise ValueError("a size or a time is 0")
    return ServerInfo(
        fingerprint=message.fingerprint.hex(),
        execution=_EXECUTION_OF[message.execution],  # type: ignore[arg-type]  # keys of a table of literals
        forward_ms=tuple(us / 1e3 for us in message.forward_us),
        **{name: getattr(message, name) for name in _AS_THEY_ARE},
    )
