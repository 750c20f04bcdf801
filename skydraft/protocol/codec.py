"""Values to bytes and back. Decoding encoded bytes gives the same value; malformed bytes raise ProtocolError."""

import functools
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from skydraft.config import MAX_K, DecodingParams, Execution
from skydraft.errors import LimitExceeded, ProtocolError
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import (
    CloseCall,
    OpenCall,
    Opened,
    Opening,
    ServerInfo,
    Stopped,
    TargetId,
    VerifyCall,
)  # fmt: skip
from skydraft.types import Cost, Draft, FinishReason, Media, Prompt, Score, Verdict

_MAX_ID = 2**31 - 1
_MAX_BEST = 20
_MOST_VOCABULARY = 64 << 20  # bytes
_FINISHES: dict[int, FinishReason | None] = {0: None, 1: "eos", 2: "stop_string", 3: "sentences", 4: "length"}
_EXECUTIONS: dict[int, Execution] = {1: "exact", 2: "throughput"}
_AS_THEY_ARE = {each.name for each in fields(ServerInfo)} - {"fingerprint", "execution"}


def digest(*token_ids: npt.NDArray[np.int32]) -> int:
    """Return the CRC-32 of ids as little-endian 32-bit integers, by which the two sides compare their tokens."""
    return functools.reduce(lambda crc, ids: zlib.crc32(ids.astype("<i4").tobytes(), crc), token_ids, 0)


def short_fingerprint(fingerprint: str) -> str:
    return fingerprint[:16]


@contextmanager
def reading(kind: str) -> Iterator[None]:
    """Turn every defect of a message into a ProtocolError. SkydraftErrors about options and limits pass."""
    try:
        yield
    except (DecodeError, ValueError, KeyError, OverflowError, zlib.error) as error:
        raise ProtocolError(f"This is no valid {kind}: {error}") from error


def _checked(token_ids: Any, most: int = _MAX_ID) -> tuple[int, ...]:
    if len(token_ids) > most:  # before each id becomes an object, which is the slowest part
        raise LimitExceeded(f"{len(token_ids)} tokens do not fit in the context of {most}.")
    ids = tuple(token_ids)
    if ids and max(ids) > _MAX_ID:
        raise ValueError(f"no token has the id {max(ids)}")
    return ids


def _params_message(params: DecodingParams) -> pb.DecodingParams:
    changed = {each.name: value for each in fields(params) if (value := getattr(params, each.name)) != each.default}
    if params.logit_bias:
        changed["logit_bias"] = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in params.logit_bias]
    return pb.DecodingParams(**changed)


def _read_params(message: pb.DecodingParams) -> DecodingParams:
    if len(UnknownFieldSet(message)):  # ignoring an option would change tokens silently
        raise ValueError("it has a decoding option that this older version does not know; upgrade it")
    for what, size, most in (
        ("stop strings", len(message.stop), 64),
        ("characters in stop strings", sum(map(len, message.stop)), 4096),
        ("biased and stop tokens", len(message.logit_bias) + len(message.stop_token_ids), 1024),
        ("characters in tags of thinking", len(message.think_start) + len(message.think_end), 128),
    ):
        if size > most:
            raise LimitExceeded(f"There are {size} {what}; a server accepts up to {most}.")
    given = {field.name: value for field, value in message.ListFields()}
    given |= {name: tuple(given[name]) for name in ("stop", "stop_token_ids") if name in given}
    if "logit_bias" in given:
        given["logit_bias"] = tuple((each.token_id, each.bias) for each in given["logit_bias"])
    return DecodingParams(**given)


def _opening_message(opening: Opening) -> pb.Opening:
    return pb.Opening(
        fingerprint=bytes.fromhex(opening.fingerprint),
        prompt_ids=opening.prompt.token_ids, committed_ids=opening.committed_ids,
        params=_params_message(opening.params) if opening.params != DecodingParams() else None,
        num_best=opening.num_best, cache_scope=opening.cache_scope,
        target=_target_message(opening.target), media=map(_media_message, opening.prompt.media),
    )  # fmt: skip


def target_id(weights: str, execution: str, context_len: int) -> TargetId:
    return TargetId(hashlib.sha256(f"{weights} {execution}".encode()).hexdigest()[:8], context_len)


def _target_message(target: TargetId | None) -> pb.TargetId | None:
    return pb.TargetId(weights=bytes.fromhex(target.weights), context_len=target.context_len) if target else None


def _read_target(message: Any) -> TargetId | None:
    target = message.target
    return TargetId(target.weights.hex(), target.context_len) if message.HasField("target") else None


def media_bytes(opening: Opening) -> int:
    return sum(2 * media.features.size for media in opening.prompt.media)


def _media_message(media: Media) -> pb.Media:
    return pb.Media(num_mels=len(media.features), features=media.features.astype("<f2").tobytes())


def _read_media(message: pb.Media) -> Media:
    values = np.frombuffer(message.features, "<f2").astype(np.float32)
    if not message.num_mels or len(values) % message.num_mels:
        raise ValueError(f"{len(values)} features do not make {message.num_mels} mels")
    return Media(values.reshape(message.num_mels, -1))


def _read_opening(message: pb.Opening, most: int) -> Opening:
    if len(message.media) > 256:
        raise ValueError(f"{len(message.media)} recordings are too many")
    if message.num_best > _MAX_BEST:
        raise ValueError(f"{message.num_best} best tokens are more than {_MAX_BEST}")
    return Opening(
        fingerprint=message.fingerprint.hex(),
        prompt=Prompt(_checked(message.prompt_ids, most), tuple(map(_read_media, message.media))),
        committed_ids=_checked(message.committed_ids, most), params=_read_params(message.params),
        cache_scope=message.cache_scope, target=_read_target(message),
        num_best=message.num_best if message.HasField("num_best") else None,
    )  # fmt: skip


def _score_message(score: Score) -> pb.Score:
    ids, logprobs = [each for each, _ in score.best], [told for _, told in score.best]
    return pb.Score(logprob=score.logprob, best_ids=ids, best_logprobs=logprobs)


def _read_scores(messages: Sequence[pb.Score], token_ids: Sequence[int]) -> tuple[Score, ...]:
    """Read a score for each token, or none at all."""
    if len(messages) not in (0, len(token_ids)):
        raise ValueError(f"it has {len(messages)} scores for {len(token_ids)} tokens")
    return tuple(
        Score(token_id, each.logprob, tuple(zip(_checked(each.best_ids), each.best_logprobs, strict=True)))
        for token_id, each in zip(token_ids, messages, strict=False)
    )


_TIMES = ("forward_ms", "queue_ms", "prefill_ms", "encode_ms")


def _cost_list(cost: Cost) -> list[int]:
    numbers = [cost.num_passes - (cost.num_rows > 0), cost.num_rows]
    numbers += [*(round(getattr(cost, name) * 100) for name in _TIMES), cost.num_cached]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _read_cost(numbers: Sequence[int]) -> Cost:
    num_extra, num_rows, *times, num_cached = (*numbers, *(0,) * (3 + len(_TIMES) - len(numbers)))
    known = {name: time / 100 for name, time in zip(_TIMES, times, strict=True)}
    return Cost(num_extra + (num_rows > 0), num_rows, num_cached=num_cached, **known)


def encode_open(call: OpenCall) -> bytes:
    return pb.SessionRequest(
        session=call.session, epoch=call.epoch, opening=_opening_message(call.opening), action=pb.ACTION_OPEN
    ).SerializeToString()


def encode_verify(call: VerifyCall) -> bytes:
    return pb.SessionRequest(
        session=call.session, epoch=call.epoch, base=call.base, catch_up_ids=call.catch_up_ids,
        draft_ids=call.draft_ids, digest=call.digest, write=call.write, action=pb.ACTION_VERIFY,
        opening=_opening_message(call.opening) if call.opening else None,
    ).SerializeToString()  # fmt: skip


def encode_draft(draft: Draft) -> bytes:
    return pb.SessionRequest(branch=draft.branch, base=draft.base, draft_ids=draft.token_ids).SerializeToString()


def encode_stop(base: int) -> bytes:
    """Encode the message that ends the target's writing after the verify of this base."""
    return pb.SessionRequest(base=base, action=pb.ACTION_STOP).SerializeToString()


def encode_close(session: int) -> bytes:
    """Encode a close message; `session` is 0 in a stream that has named its session."""
    return pb.SessionRequest(session=session, action=pb.ACTION_CLOSE).SerializeToString()


@reading("SessionRequest")
def decode_call(data: bytes, session: int, most: int = _MAX_ID) -> OpenCall | VerifyCall | CloseCall:
    """Decode a request; `session` is the stream's number, 0 before its first message. Raises ProtocolError, and
    LimitExceeded for more than `most` tokens."""
    message = pb.SessionRequest.FromString(data)
    if session and message.session not in (0, session):
        raise ValueError(f"this stream is about session {session}, and no other")
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
        session=session, epoch=message.epoch, base=message.base, digest=message.digest, write=message.write,
        catch_up_ids=_checked(message.catch_up_ids, most), draft_ids=_checked(message.draft_ids, most),
        opening=_read_opening(message.opening, most) if message.HasField("opening") else None,
    )  # fmt: skip
    if call.base < len(call.catch_up_ids):
        raise ValueError(f"{len(call.catch_up_ids)} catch-up tokens are more than its base of {call.base}")
    if call.opening and len(call.opening.committed_ids) + len(call.catch_up_ids) != call.base:
        raise ValueError(f"its opening and its catch-up tokens do not add up to {call.base}")
    return call


def decode_aside(data: bytes) -> Draft | int | None:
    """Decode a message without a reply: drafts, or the base of a stop. None for all others, malformed ones included."""
    try:
        message = pb.SessionRequest.FromString(data)
    except DecodeError:
        return None
    if message.action == pb.ACTION_DRAFT and message.draft_ids:
        return Draft(message.branch, message.base, tuple(message.draft_ids))
    return message.base if message.action == pb.ACTION_STOP else None


def encode_opened(opened: Opened, target: TargetId | None = None) -> bytes:
    """Encode the reply to an opening; `target` is given if the opening named none."""
    cost = _cost_list(opened.cost)
    return pb.SessionReply(base=opened.base, cost=cost, target=_target_message(target)).SerializeToString()


@reading("SessionReply")
def decode_opened(data: bytes) -> tuple[Opened, TargetId | None]:
    message = pb.SessionReply.FromString(data)
    return Opened(message.base, _read_cost(message.cost)), _read_target(message)


def encode_verdict(
    verdict: Verdict, target: TargetId | None = None, *, is_last: bool = False, is_first: bool = True
) -> bytes:
    """Encode a verdict; `target` is as in `encode_opened`. `is_last` marks the last reply to a verify that let the
    target write. `is_first` is False for tokens that it writes after the verdict."""
    return pb.SessionReply(
        first=is_first,
        base=verdict.base, num_accepted=verdict.num_accepted, token_id=verdict.token_id,
        finish=f"FINISH_{verdict.finish}".upper(), audit=np.packbits(np.array(verdict.audit, bool)).tobytes(),
        cost=_cost_list(verdict.cost), target=_target_message(target), last=is_last,
        scores=map(_score_message, verdict.scores), branch=verdict.branch, num_fed=len(verdict.draft_ids),
    ).SerializeToString()  # fmt: skip


def encode_stopped(stopped: Stopped) -> bytes:
    return pb.SessionReply(base=stopped.base, last=True).SerializeToString()


@reading("SessionReply")
def decode_verdict(
    data: bytes, num_audited: int = 0, sent_ids: Sequence[int] = (),
    drafts: Mapping[int, Draft] = MappingProxyType({}), *, is_first: bool = True,
) -> tuple[Verdict | None, bool, TargetId | None]:  # fmt: skip
    """Decode (verdict, whether it is the last reply, target), for a block with `num_audited` catch-up ids. The verdict
    is None if the target was stopped. `sent_ids` (catch-up and draft ids) are needed for scores. `drafts`, by branch,
    may be judged instead."""
    message = pb.SessionReply.FromString(data)
    if message.last and not (message.num_accepted or message.HasField("token_id")):
        return None, True, None
    if message.first != is_first:
        raise ValueError("it answers something else")
    bits = np.unpackbits(np.frombuffer(message.audit, np.uint8)).astype(bool)
    if len(message.audit) != -(-num_audited // 8) or bits[num_audited:].any():
        raise ValueError(f"it has {len(message.audit)} bytes of audit for {num_audited} tokens")
    judged = drafts[message.branch].at(message.base, message.num_fed) if message.num_fed else ()
    if len(judged) != message.num_fed or (judged and message.num_accepted > len(judged)):
        raise ValueError(f"it judges {message.num_fed} drafts, but {len(judged)} were sent")
    token_id = _checked([message.token_id])[0] if message.HasField("token_id") else None
    audit, cost = tuple(bits[:num_audited].tolist()), _read_cost(message.cost)
    stands = (*(judged or sent_ids)[: num_audited + message.num_accepted], *(() if token_id is None else (token_id,)))
    verdict = Verdict(
        message.base, message.num_accepted, token_id, _FINISHES[message.finish], audit, cost,
        _read_scores(message.scores, stands), judged, message.branch if judged else 0,
    )  # fmt: skip
    return verdict, message.last, _read_target(message)


VOCABULARY_WANTED = pb.GetInfoRequest(vocabulary=True).SerializeToString()


def encode_info(info: ServerInfo, vocabulary: bytes = b"") -> bytes:
    return pb.GetInfoReply(
        vocabulary=zlib.compress(vocabulary) if vocabulary else b"",
        fingerprint=bytes.fromhex(info.fingerprint),
        execution=f"EXECUTION_{info.execution}".upper(),
        max_block=MAX_K,
        **{name: getattr(info, name) for name in _AS_THEY_ARE},
    ).SerializeToString()


@reading("GetInfoReply")
def decode_info(data: bytes) -> ServerInfo:
    message = pb.GetInfoReply.FromString(data)
    if min(message.vocab_size, message.context_len, message.max_sessions) < 1:
        raise ValueError("a size is 0")
    same = {name: getattr(message, name) for name in _AS_THEY_ARE}
    return ServerInfo(fingerprint=message.fingerprint.hex(), execution=_EXECUTIONS[message.execution], **same)


@reading("GetInfoReply")
def decode_vocabulary(data: bytes) -> bytes:
    """Decode a GGUF file without matrices; empty if the server gives none."""
    packed = zlib.decompressobj()
    vocabulary = packed.decompress(pb.GetInfoReply.FromString(data).vocabulary, _MOST_VOCABULARY)
    if packed.unconsumed_tail:
        raise ValueError("its vocabulary is too large")
    return vocabulary
