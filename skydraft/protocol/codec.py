"""Values to bytes and back. Decoding encoded bytes gives the same value; malformed bytes raise ProtocolError."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from skydraft.config import DecodingParams
from skydraft.errors import GrammarRefused, LimitExceeded, OptionError, ProtocolError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import (
    Call,
    CloseCall,
    OpenCall,
    Opened,
    Opening,
    ServerInfo,
    StopCall,
    TargetId,
    VerifyCall,
    Written,
)
from skydraft.types import Cost, FinishReason, Media, Prompt, Verdict

FINGERPRINT_DIGITS = 16
UNKNOWN_OPTION = "it has a decoding option that this older version does not know"  # the edge knows it by these words
_MAX_ID = 2**31 - 1
_MAX_RECORDINGS = 256
_MAX_LISTED = 4096  # stop strings, or biases: longer lists are refused unread; a server may accept far fewer
_FINISH: dict[FinishReason | None, pb.Finish] = {
    None: pb.FINISH_NONE,
    "eos": pb.FINISH_EOS,
    "stop_string": pb.FINISH_STOP_STRING,
    "sentences": pb.FINISH_SENTENCES,
    "length": pb.FINISH_LENGTH,
}
_FINISH_OF = {number: reason for reason, number in _FINISH.items()}
_EXECUTIONS: dict[str, pb.Execution] = {"exact": pb.EXECUTION_EXACT, "throughput": pb.EXECUTION_THROUGHPUT}
_EXECUTION_OF = {number: name for name, number in _EXECUTIONS.items()}
_AS_THEY_ARE = (
    "version", "model", "vocab_size", "context_len", "max_rows", "max_block", "max_sessions", "num_sessions",
    "invariant_rows", "weights",
)  # fmt: skip
_PARAM_NAMES = tuple(field.name for field in fields(DecodingParams))
_DEFAULT_PARAMS = DecodingParams()


def digest(*token_ids: npt.NDArray[np.int32]) -> int:
    """CRC-32 of ids as little-endian 32-bit integers; a difference shows that the two sides hold different tokens."""
    return functools.reduce(lambda crc, ids: zlib.crc32(ids.astype("<i4").tobytes(), crc), token_ids, 0)


def short_fingerprint(fingerprint: str) -> str:
    return fingerprint[:FINGERPRINT_DIGITS]


@contextmanager
def reading(kind: str) -> Iterator[None]:
    """Every defect of a message becomes a ProtocolError. GrammarRefused and LimitExceeded are none, and pass."""
    try:
        yield
    except GrammarRefused:
        raise
    except (DecodeError, ValueError, KeyError, OverflowError, OptionError) as error:
        raise ProtocolError(f"This is no valid {kind}: {error}") from error


@contextmanager
def sending() -> Iterator[None]:
    """What cannot be put into a message becomes a ProtocolError."""
    try:
        yield
    except (EncodeError, ValueError, TypeError) as error:
        raise ProtocolError(f"This cannot be sent: {error}") from error


def _checked(token_ids: Any, most: int = _MAX_ID) -> tuple[int, ...]:
    if len(token_ids) > most:  # before each id becomes an object, the slowest part
        raise LimitExceeded(f"{len(token_ids)} tokens do not fit in the context of {most}.")
    ids = tuple(token_ids)
    if ids and max(ids) > _MAX_ID:
        raise ValueError(f"no token has the id {max(ids)}")
    return ids


def _params_message(params: DecodingParams) -> pb.DecodingParams:
    given = {name: getattr(params, name) for name in _PARAM_NAMES}
    changed = {name: value for name, value in given.items() if value != getattr(_DEFAULT_PARAMS, name)}
    if params.logit_bias:
        changed["logit_bias"] = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias]
    return pb.DecodingParams(**changed)


def _read_params(message: pb.DecodingParams) -> DecodingParams:
    if len(UnknownFieldSet(message)):  # to ignore an option would change tokens silently
        raise ValueError(f"{UNKNOWN_OPTION}; upgrade it")
    if max(len(message.stop), len(message.logit_bias), len(message.stop_token_ids)) > _MAX_LISTED:
        raise LimitExceeded(f"There are more than {_MAX_LISTED} stop strings, stop tokens, or biased tokens.")
    given = {field.name: value for field, value in message.ListFields()}
    given |= {name: tuple(given[name]) for name in ("stop", "stop_token_ids") if name in given}
    if "logit_bias" in given:
        given["logit_bias"] = tuple((each.token_id, each.bias) for each in given["logit_bias"])
    return DecodingParams(**given)


def _opening_message(opening: Opening) -> pb.Opening:
    return pb.Opening(
        fingerprint=bytes.fromhex(opening.fingerprint),
        prompt_ids=opening.prompt.token_ids,
        committed_ids=opening.committed_ids,
        params=_params_message(opening.params) if opening.params != _DEFAULT_PARAMS else None,
        top=opening.top,
        cache_scope=opening.cache_scope,
        target=_target_message(opening.target),
        media=map(_media_message, opening.prompt.media),
    )


def target_id(weights: str, execution: str, context_len: int) -> TargetId:
    """The identity of a target in openings, from the fields of its GetInfo reply."""
    return TargetId(hashlib.sha256(f"{weights} {execution}".encode()).hexdigest()[:8], context_len)


def _target_message(target: TargetId | None) -> pb.TargetId | None:
    return pb.TargetId(weights=bytes.fromhex(target.weights), context_len=target.context_len) if target else None


def _read_target(message: Any) -> TargetId | None:
    if not message.HasField("target"):
        return None
    if len(message.target.weights) != 4:
        raise ValueError("it names no target")
    return TargetId(message.target.weights.hex(), message.target.context_len)


def _media_message(media: Media) -> pb.Media:
    return pb.Media(num_mels=len(media.features), features=media.features.astype("<f2").tobytes())


def media_bytes(opening: Opening) -> int:
    """Of speech features."""
    return sum(2 * media.features.size for media in opening.prompt.media)


def _read_media(message: pb.Media) -> Media:
    values = np.frombuffer(message.features, "<f2").astype(np.float32)
    if not message.num_mels or len(values) % message.num_mels:
        raise ValueError(f"{len(values)} features do not make {message.num_mels} mels")
    return Media(values.reshape(message.num_mels, -1))


def _read_opening(message: pb.Opening, most: int) -> Opening:
    if len(message.media) > _MAX_RECORDINGS:
        raise ValueError(f"{len(message.media)} recordings are too many")
    return Opening(
        fingerprint=message.fingerprint.hex(),
        prompt=Prompt(_checked(message.prompt_ids, most), tuple(map(_read_media, message.media))),
        committed_ids=_checked(message.committed_ids, most),
        params=_read_params(message.params),
        top=message.top,
        cache_scope=message.cache_scope,
        target=_read_target(message),
    )


_TIMES = ("forward_ms", "queue_ms", "prefill_ms", "encode_ms")


def _cost_list(cost: Cost) -> list[int]:
    numbers = [cost.num_passes - (cost.num_rows > 0), cost.num_rows]
    numbers += [*(round(getattr(cost, name) * 100) for name in _TIMES), cost.num_cached]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _read_cost(numbers: Sequence[int]) -> Cost:
    num_parts = 3 + len(_TIMES)
    if len(numbers) > num_parts:
        raise ValueError(f"a cost has no {len(numbers)} parts")
    num_extra, num_rows, *times, num_cached = (*numbers, *(0,) * (num_parts - len(numbers)))
    known = {name: time / 100 for name, time in zip(_TIMES, times, strict=True)}
    return Cost(num_extra + (num_rows > 0), num_rows, num_cached=num_cached, **known)


@sending()
def encode_open(call: OpenCall) -> bytes:
    opening = _opening_message(call.opening)
    request = pb.SessionRequest(session=call.session, epoch=call.epoch, opening=opening, action=pb.ACTION_OPEN)
    return request.SerializeToString()


@sending()
def encode_verify(call: VerifyCall) -> bytes:
    return pb.SessionRequest(
        session=call.session,
        epoch=call.epoch,
        base=call.base,
        catch_up_ids=call.catch_up_ids,
        draft_ids=call.draft_ids,
        digest=call.digest,
        opening=_opening_message(call.opening) if call.opening else None,
        write=call.write,
    ).SerializeToString()


@sending()
def encode_stop(call: StopCall) -> bytes:
    return pb.SessionRequest(base=call.base, action=pb.ACTION_STOP).SerializeToString()


@sending()
def encode_close(session: int) -> bytes:
    """`session` is 0 in a stream that has named the session."""
    return pb.SessionRequest(session=session, action=pb.ACTION_CLOSE).SerializeToString()


@reading("SessionRequest")
def decode_call(data: bytes, session: int, most: int = _MAX_ID) -> Call:
    """The request of an edge's message. `session` is the session of the stream, 0 before its first message.

    Raises LimitExceeded for lists of more than `most` tokens.
    """
    message = pb.SessionRequest.FromString(data)
    if session and message.session not in (0, session):
        raise ValueError(f"this stream is about session {session}, and none but that")
    if message.action == pb.ACTION_STOP:
        return StopCall(message.base)
    if not (number := session or message.session):
        raise ValueError("it names no session")
    if message.action == pb.ACTION_VERIFY:
        return _read_verify(message, number, most)
    if message.action == pb.ACTION_CLOSE:
        return CloseCall(number)
    if message.action != pb.ACTION_OPEN or not message.HasField("opening"):
        raise ValueError("it has no opening, or asks for something unknown")
    return OpenCall(number, message.epoch, _read_opening(message.opening, most))


def _read_verify(message: pb.SessionRequest, session: int, most: int) -> VerifyCall:
    call = VerifyCall(
        session=session,
        epoch=message.epoch,
        base=message.base,
        catch_up_ids=_checked(message.catch_up_ids, most),
        draft_ids=_checked(message.draft_ids, most),
        digest=message.digest,
        opening=_read_opening(message.opening, most) if message.HasField("opening") else None,
        write=message.write,
    )
    if call.base < len(call.catch_up_ids):
        raise ValueError(f"{len(call.catch_up_ids)} catch-up tokens are more than its base of {call.base}")
    if call.opening and len(call.opening.committed_ids) + len(call.catch_up_ids) != call.base:
        raise ValueError(f"its opening and its catch-up tokens do not add up to {call.base}")
    return call


def stopped_base(data: bytes) -> int | None:
    """The base of a stop message; None for any other message, also a malformed one."""
    try:
        message = pb.SessionRequest.FromString(data)
    except DecodeError:
        return None
    return message.base if message.action == pb.ACTION_STOP else None


@sending()
def encode_opened(opened: Opened, target: TargetId | None = None) -> bytes:
    """`target` is given if the opening named none."""
    reply = pb.SessionReply(base=opened.base, cost=_cost_list(opened.cost), target=_target_message(target))
    return reply.SerializeToString()


@reading("SessionReply")
def decode_opened(data: bytes) -> Opened:
    message = pb.SessionReply.FromString(data)
    return Opened(message.base, _read_cost(message.cost))


@sending()
def encode_verdict(verdict: Verdict, target: TargetId | None = None, *, is_last: bool = False) -> bytes:
    """`target` is given if the call opened the session and named none.

    `is_last` marks the verdict of a call that let the target write, if the target writes nothing.
    """
    return pb.SessionReply(
        base=verdict.base,
        num_accepted=verdict.num_accepted,
        token_id=verdict.token_id,
        finish=_FINISH[verdict.finish],
        audit=np.packbits(np.array(verdict.audit, bool)).tobytes(),
        cost=_cost_list(verdict.cost),
        target=_target_message(target),
        last=is_last,
    ).SerializeToString()


@reading("SessionReply")
def decode_verdict(data: bytes, num_audited: int) -> tuple[Verdict, bool]:
    """(verdict, whether it is marked as the last reply), from the reply to a block with `num_audited` catch-up ids."""
    message = pb.SessionReply.FromString(data)
    bits = np.unpackbits(np.frombuffer(message.audit, np.uint8)).astype(bool)
    if len(message.audit) != -(-num_audited // 8) or bits[num_audited:].any():
        raise ValueError(f"it has {len(message.audit)} bytes of audit for {num_audited} tokens")
    token_id = _checked([message.token_id])[0] if message.HasField("token_id") else None
    audit, cost = tuple(bits[:num_audited].tolist()), _read_cost(message.cost)
    verdict = Verdict(message.base, message.num_accepted, token_id, _FINISH_OF[message.finish], audit, cost)
    return verdict, message.last


@sending()
def encode_written(written: Written) -> bytes:
    return pb.SessionReply(
        base=written.base,
        written_ids=written.token_ids,
        finish=_FINISH[written.finish],
        cost=_cost_list(written.cost),
        last=written.is_last,
    ).SerializeToString()


@reading("SessionReply")
def decode_written(data: bytes) -> Written:
    """Tokens that the target wrote after a verdict; only the last reply may hold none."""
    message = pb.SessionReply.FromString(data)
    if not message.written_ids and not message.last:
        raise ValueError("it holds no tokens")
    cost = _read_cost(message.cost)
    return Written(message.base, _checked(message.written_ids), _FINISH_OF[message.finish], message.last, cost)


@reading("SessionReply")
def decode_target(data: bytes) -> TargetId | None:
    return _read_target(pb.SessionReply.FromString(data))


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
