"""Values to bytes and back. Decoding what was encoded gives the same value; whatever else comes is a ProtocolError."""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from skydraft.config import DecodingParams
from skydraft.errors import GrammarRefused, LimitExceeded, OptionError, ProtocolError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Emission, Opened, Opening, SessionCall, TargetId, VerifyCall
from skydraft.types import Cost, FinishReason, Media, Prompt, Verdict

M = TypeVar("M", bound=Message)
V = TypeVar("V")
P = ParamSpec("P")
OpenedKind = type[pb.OpenReply] | type[pb.VerifyReply]

FINGERPRINT_DIGITS = 16
_MAX_ID = 2**31 - 1
_MAX_RECORDINGS = 256
_MAX_LISTED = 4096  # stop strings, or biases: a server may take far fewer, but looks no further than this
_FINISH: dict[FinishReason | None, pb.Finish] = {
    None: pb.FINISH_NONE,
    "eos": pb.FINISH_EOS,
    "stop_string": pb.FINISH_STOP_STRING,
    "sentences": pb.FINISH_SENTENCES,
    "length": pb.FINISH_LENGTH,
}
_FINISH_OF = {number: reason for reason, number in _FINISH.items()}
_PARAM_NAMES = tuple(field.name for field in fields(DecodingParams))
_DEFAULT_PARAMS = DecodingParams()


def digest(*token_ids: npt.NDArray[np.int32]) -> int:
    """CRC-32 of ids as little-endian 32-bit integers: by it both sides notice that they hold different tokens."""
    return functools.reduce(lambda crc, ids: zlib.crc32(ids.astype("<i4").tobytes(), crc), token_ids, 0)


def short_fingerprint(fingerprint: str) -> str:
    """As much of a vocabulary's fingerprint as crosses the wire."""
    return fingerprint[:FINGERPRINT_DIGITS]


def decoder(kind: type[M]) -> Callable[[Callable[Concatenate[M, P], V]], Callable[Concatenate[bytes, P], V]]:
    """Turn a function of a parsed message into one of bytes, in which every defect is a ProtocolError.

    GrammarRefused stays what it is: it is no defect of the message.
    """

    def decorate(read: Callable[Concatenate[M, P], V]) -> Callable[Concatenate[bytes, P], V]:
        def decode(data: bytes, /, *args: P.args, **kwargs: P.kwargs) -> V:
            try:
                return read(kind.FromString(data), *args, **kwargs)
            except GrammarRefused:
                raise
            except (DecodeError, ValueError, KeyError, OverflowError, OptionError) as error:
                raise ProtocolError(f"This is no valid {kind.__name__}: {error}") from error

        decode.__name__, decode.__doc__ = read.__name__, read.__doc__
        return decode

    return decorate


def encoder(write: Callable[P, Message]) -> Callable[P, bytes]:
    """Turn a function that makes a message into one that makes its bytes; what cannot be said is a ProtocolError."""

    @functools.wraps(write)
    def encode(*args: P.args, **kwargs: P.kwargs) -> bytes:
        try:
            return write(*args, **kwargs).SerializeToString()
        except (EncodeError, ValueError, TypeError) as error:
            raise ProtocolError(f"This cannot be sent: {error}") from error

    return encode


def _checked(token_ids: Any, most: int = _MAX_ID) -> tuple[int, ...]:
    if len(token_ids) > most:  # before each of them becomes an object, which takes longer than all else
        raise LimitExceeded(f"{len(token_ids)} tokens do not fit in the context of {most}.")
    ids = tuple(token_ids)
    if ids and max(ids) > _MAX_ID:
        raise ValueError(f"no token has the id {max(ids)}")
    return ids


def _named(session: int) -> int:
    if not session:
        raise ValueError("it names no session")
    return session


def _params_message(params: DecodingParams) -> pb.DecodingParams:
    changed = {name: getattr(params, name) for name in _PARAM_NAMES}
    biases = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias]
    return pb.DecodingParams(
        **{name: value for name, value in changed.items() if value != getattr(_DEFAULT_PARAMS, name)}
        | ({"logit_bias": biases} if biases else {})
    )


def _read_params(message: pb.DecodingParams) -> DecodingParams:
    if len(UnknownFieldSet(message)):  # ignored, it would change tokens silently
        raise ValueError("it has a decoding option that this older version does not know; upgrade it")
    if max(len(message.stop), len(message.logit_bias)) > _MAX_LISTED:
        raise LimitExceeded(f"There are more than {_MAX_LISTED} stop strings, or biased tokens.")
    given = {field.name: value for field, value in message.ListFields()}
    if "stop" in given:
        given["stop"] = tuple(given["stop"])
    if "logit_bias" in given:
        given["logit_bias"] = tuple((each.token_id, each.bias) for each in given["logit_bias"])
    return DecodingParams(**given)


def _opening_message(opening: Opening) -> pb.Opening:
    return pb.Opening(
        model=opening.model,
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
    """How a target is named in openings, from what GetInfo says of it."""
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
    """Bytes of speech features in an opening."""
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
        model=message.model,
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


@encoder
def encode_session_call(call: SessionCall) -> pb.OpenRequest:
    """Bytes of an OpenRequest or a GenerateRequest, which have the same fields."""
    return pb.OpenRequest(session=call.session, epoch=call.epoch, opening=_opening_message(call.opening))


@decoder(pb.OpenRequest)
def decode_session_call(message: pb.OpenRequest, most: int = _MAX_ID) -> SessionCall:
    """The value of an OpenRequest or a GenerateRequest. Raises LimitExceeded for lists of more than `most` tokens."""
    if not message.HasField("opening"):
        raise ValueError("it has no opening")
    return SessionCall(_named(message.session), message.epoch, _read_opening(message.opening, most))


@encoder
def encode_opened(opened: Opened, target: TargetId | None = None, reply: OpenedKind = pb.OpenReply) -> Message:
    """Bytes of an OpenReply, which says who opened where the call did not; in a Session of a VerifyReply."""
    return reply(base=opened.base, cost=_cost_list(opened.cost), target=_target_message(target))


def _read_opened(message: pb.OpenReply | pb.VerifyReply) -> Opened:
    """The value of an OpenReply, or of what stands for one in a Session."""
    return Opened(message.base, _read_cost(message.cost))


decode_opened = decoder(pb.OpenReply)(_read_opened)
decode_streamed_opened = decoder(pb.VerifyReply)(_read_opened)


@encoder
def encode_verify_call(call: VerifyCall) -> pb.VerifyRequest:
    """Bytes of a VerifyRequest."""
    return pb.VerifyRequest(
        session=call.session,
        epoch=call.epoch,
        base=call.base,
        catch_up_ids=call.catch_up_ids,
        draft_ids=call.draft_ids,
        digest=call.digest,
        opening=_opening_message(call.opening) if call.opening else None,
    )


@encoder
def encode_streamed_open(call: SessionCall) -> pb.VerifyRequest:
    """Bytes of a message of a Session that opens it and judges nothing yet."""
    opening = _opening_message(call.opening)
    return pb.VerifyRequest(session=call.session, epoch=call.epoch, opening=opening, action=pb.ACTION_OPEN)


CLOSES = pb.VerifyRequest(action=pb.ACTION_CLOSE).SerializeToString()  # a message that ends a Session


@decoder(pb.VerifyRequest)
def decode_verify_call(message: pb.VerifyRequest, most: int = _MAX_ID) -> VerifyCall:
    """The value of a VerifyRequest. Raises LimitExceeded for lists of more than `most` tokens."""
    if message.action:
        raise ValueError("it asks for what only a Session does")
    return _read_verify_call(message, message.session, most)


@decoder(pb.VerifyRequest)
def decode_streamed(message: pb.VerifyRequest, session: int, most: int = _MAX_ID) -> VerifyCall | SessionCall | None:
    """What a message of a Session asks for: None is its end. `session` is the one that it is about, 0 before the first.

    Raises LimitExceeded for lists of more than `most` tokens.
    """
    if session and message.session not in (0, session):
        raise ValueError(f"this stream is about session {session}, and none but that")
    number = session or message.session
    if message.action == pb.ACTION_VERIFY:
        return _read_verify_call(message, number, most)
    if message.action == pb.ACTION_CLOSE:
        return None
    if message.action != pb.ACTION_OPEN or not message.HasField("opening"):
        raise ValueError("it has no opening, or asks for something unknown")
    return SessionCall(_named(number), message.epoch, _read_opening(message.opening, most))


def _read_verify_call(message: pb.VerifyRequest, session: int, most: int) -> VerifyCall:
    call = VerifyCall(
        session=_named(session),
        epoch=message.epoch,
        base=message.base,
        catch_up_ids=_checked(message.catch_up_ids, most),
        draft_ids=_checked(message.draft_ids, most),
        digest=message.digest,
        opening=_read_opening(message.opening, most) if message.HasField("opening") else None,
    )
    if call.base < len(call.catch_up_ids):
        raise ValueError(f"{len(call.catch_up_ids)} catch-up tokens are more than its base of {call.base}")
    if call.opening and len(call.opening.committed_ids) + len(call.catch_up_ids) != call.base:
        raise ValueError(f"its opening and its catch-up tokens do not add up to {call.base}")
    return call


@encoder
def encode_verdict(verdict: Verdict, target: TargetId | None = None) -> pb.VerifyReply:
    """Bytes of a VerifyReply, which says who judges where the call opened a session and did not."""
    return pb.VerifyReply(
        base=verdict.base,
        num_accepted=verdict.num_accepted,
        token_id=verdict.token_id,
        finish=_FINISH[verdict.finish],
        audit=np.packbits(np.array(verdict.audit, bool)).tobytes(),
        audit_ranks=verdict.audit_ranks,
        cost=_cost_list(verdict.cost),
        target=_target_message(target),
    )


def decode_verdict(data: bytes, num_audited: int) -> Verdict:
    """The value of a VerifyReply to a request with `num_audited` catch-up tokens."""
    return _read_verdict(data)(num_audited)


@decoder(pb.VerifyReply)
def _read_verdict(message: pb.VerifyReply) -> Callable[[int], Verdict]:
    token_id = _checked([message.token_id])[0] if message.HasField("token_id") else None
    finish, cost = _FINISH_OF[message.finish], _read_cost(message.cost)
    bits = np.unpackbits(np.frombuffer(message.audit, np.uint8)).astype(bool)

    def of_request(num_audited: int) -> Verdict:
        if len(message.audit) != -(-num_audited // 8) or bits[num_audited:].any():
            raise ProtocolError(f"A verdict with {len(message.audit)} bytes of audit for {num_audited} tokens.")
        audit = tuple(bits[:num_audited].tolist())
        try:
            return Verdict(
                message.base, message.num_accepted, token_id, finish, audit, tuple(message.audit_ranks), cost=cost
            )
        except ValueError as error:
            raise ProtocolError(f"This is no valid VerifyReply: {error}") from error

    return of_request


@encoder
def encode_emission(emission: Emission, target: TargetId | None = None) -> pb.GenerateReply:
    """Bytes of a GenerateReply, the first of which says who writes where the call did not."""
    return pb.GenerateReply(
        base=emission.base,
        token_ids=emission.token_ids,
        finish=_FINISH[emission.finish],
        cost=_cost_list(emission.cost),
        target=_target_message(target),
    )


@decoder(pb.GenerateReply)
def decode_emission(message: pb.GenerateReply) -> Emission:
    """The value of a GenerateReply."""
    if not message.token_ids:
        raise ValueError("it holds no tokens")
    return Emission(message.base, _checked(message.token_ids), _FINISH_OF[message.finish], _read_cost(message.cost))


def decode_target(data: bytes, reply: Literal["OpenReply", "VerifyReply", "GenerateReply"]) -> TargetId | None:
    """Who sent a reply, where that was not known. Raises ProtocolError."""
    return _TARGET_OF[reply](data)


_TARGET_OF: dict[str, Callable[[bytes], TargetId | None]] = {
    "OpenReply": decoder(pb.OpenReply)(_read_target),
    "VerifyReply": decoder(pb.VerifyReply)(_read_target),
    "GenerateReply": decoder(pb.GenerateReply)(_read_target),
}


@encoder
def encode_close(session: int) -> pb.CloseRequest:
    """Bytes of a CloseRequest."""
    return pb.CloseRequest(session=session)


@decoder(pb.CloseRequest)
def decode_close(message: pb.CloseRequest) -> int:
    """The session in a CloseRequest."""
    return message.session
