"""Laws of the codec, on whatever crosses the wire: what was encoded comes back, the digest tells texts apart, no
message grows unnoticed, and any bytes are a value that keeps every invariant, or a ProtocolError that says why not."""

import dataclasses
import random
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.errors import LimitExceeded, ProtocolError, UsageError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import decode_info, encode_info
from skydraft.protocol.values import CloseCall, OpenCall, Opened, Opening, ServerInfo, Stopped, TargetId, VerifyCall
from skydraft.types import Cost, Draft, Media, Prompt, Verdict
from tests.grammars import GRAMMARS
from tests.mutating import flipped
from tests.toys import law

Call = OpenCall | VerifyCall | CloseCall
UINT32 = 2**32 - 1
MAX_ID = 2**31 - 1
numbers = st.integers(0, UINT32)
sessions = st.integers(1, UINT32)
few_ids = st.lists(st.integers(0, 200_000) | st.just(MAX_ID), max_size=12).map(tuple)
texts = st.text(max_size=12)
finishes = st.sampled_from([None, "eos", "stop_string", "sentences", "length"])
fingerprints = st.binary(max_size=8).map(bytes.hex)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


def _any_of(option: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Any number within the bounds that the option states."""
    low, high = option.metadata["option"].low, option.metadata["option"].high
    if isinstance(option.default, bool):
        return st.booleans()
    return st.integers(low, high) if isinstance(option.default, int) else between(low, high)


_options = dataclasses.fields(DecodingParams)
_numbers = {each.name: _any_of(each) for each in _options if isinstance(each.default, int | float)}
_numbers["temperature"] = st.just(0.0) | between(1e-6, 100)
_biases = st.dictionaries(st.integers(0, MAX_ID), between(-100, 100), max_size=3)
_without_grammar = st.builds(
    DecodingParams, logit_bias=_biases.map(lambda biases: tuple(sorted(biases.items()))),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple), think_end=st.text(min_size=1, max_size=8),
    think_start=st.text(max_size=8), stop_token_ids=st.sets(st.integers(0, MAX_ID), max_size=3).map(sorted).map(tuple),
    **_numbers,
)  # fmt: skip
_grammars = st.sampled_from([*GRAMMARS, "json_object:", 'json_schema:{"const":"我们"}'])
any_params = _without_grammar | st.builds(
    lambda params, grammar: dataclasses.replace(params, sentences=0, grammar=grammar), _without_grammar, _grammars
)
# Features as they cross the wire: in half precision already.
media = st.builds(
    lambda shape, value: Media(np.full(shape, value, np.float16).astype(np.float32)),
    st.tuples(st.integers(1, 5), st.integers(3, 9)), st.floats(-60_000, 60_000, width=16),
)  # fmt: skip
targets = st.builds(TargetId, st.binary(min_size=4, max_size=4).map(bytes.hex), numbers)
openings = st.builds(
    Opening, fingerprint=fingerprints, prompt=st.builds(Prompt, few_ids, st.lists(media, max_size=3).map(tuple)),
    committed_ids=few_ids, params=st.just(DecodingParams()) | any_params, cache_scope=texts, target=st.none() | targets,
)  # fmt: skip
times = {name: between(0, 4e7) for name in ("forward_ms", "prefill_ms", "encode_ms", "queue_ms")}
sizes = numbers.filter(bool)
costs = (  # of a prompt, or of nothing: no rows
    st.builds(Cost, num_passes=st.just(0) | numbers, num_cached=st.just(0) | numbers, **times)
    | st.builds(Cost, num_passes=st.integers(1, 2**32), num_rows=sizes, **times)
)
infos = st.builds(
    ServerInfo, fingerprint=fingerprints, execution=st.sampled_from(["exact", "throughput"]),
    **dict.fromkeys(("version", "model", "weights"), texts),
    **dict.fromkeys(("vocab_size", "context_len", "max_sessions"), sizes), num_sessions=numbers,
)  # fmt: skip


@st.composite
def verify_calls(draw: st.DrawFn) -> VerifyCall:
    catch_up, opening = draw(few_ids), draw(st.none() | openings)
    before = len(opening.committed_ids) if opening else draw(st.integers(0, 3) | st.integers(0, UINT32 - len(catch_up)))
    session, epoch, digest, write = draw(sessions), draw(numbers), draw(numbers), draw(numbers)
    return VerifyCall(session, epoch, before + len(catch_up), catch_up, draw(few_ids), digest, opening, write)


calls: st.SearchStrategy[Call] = st.one_of(
    st.builds(OpenCall, session=sessions, epoch=numbers, opening=openings),
    verify_calls(),
    st.builds(CloseCall, sessions),
)


def encoded(call: Call) -> bytes:
    if isinstance(call, CloseCall):
        return codec.encode_close(call.session)
    return codec.encode_open(call) if isinstance(call, OpenCall) else codec.encode_verify(call)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    num_accepted, finish = draw(st.integers(0, 40) | numbers), draw(finishes)
    ids = st.integers(0, MAX_ID)
    token_id = draw(ids | st.none() if finish and num_accepted else ids)
    audit = draw(st.lists(st.booleans(), max_size=40).map(tuple))
    return Verdict(draw(numbers), num_accepted, token_id, finish, audit, draw(costs))


def as_sent(cost: Cost) -> Cost:
    """Times as they cross the wire: in units of 10 microseconds."""
    return dataclasses.replace(cost, **{name: round(getattr(cost, name) * 100) / 100 for name in times})


# How each message is read, and written again.
Reader = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]


def verdict_on(num_audited: int) -> Reader:
    decode = partial(codec.decode_verdict, num_audited=num_audited)
    stopped = codec.encode_stopped(Stopped(0))
    return decode, lambda read: codec.encode_verdict(read[0], read[2], is_last=read[1]) if read[0] else stopped


READERS: list[Reader] = [
    (partial(codec.decode_call, session=0), encoded),
    (partial(codec.decode_call, session=2_000_000), encoded),
    verdict_on(0),
    verdict_on(11),
    (decode_info, encode_info),
    (codec.decode_opened, lambda read: codec.encode_opened(*read)),
]


def read_all(data: bytes) -> None:
    """Let every decoder read `data`. Fails on any other error than a refusal."""
    codec.decode_aside(data)
    for decode, encode in READERS:
        try:
            value = decode(data)
        except UsageError:
            continue
        assert decode(encode(value)) == value


any_message = st.one_of(
    calls.map(encoded), verdicts().map(codec.encode_verdict), infos.map(encode_info), st.just(b""),
    st.builds(Opened, st.integers(0, 9), costs).map(codec.encode_opened), st.integers(0, 9).map(codec.encode_stop),
)  # fmt: skip


@law(200)
@given(calls)
@example(OpenCall(1, 0, Opening("", Prompt(()), params=DecodingParams(full_stop_shift=0.0))))  # 0, but no default
@example(VerifyCall(1, 0, 0, (), (5, 6), 7))  # right after the prompt
@example(VerifyCall(1, 0, 2, (8, 9), (), 7))  # all that was generated is caught up
def test_a_call_comes_back_and_only_a_stop_names_what_it_stops(call: Call) -> None:
    data = encoded(call)
    assert codec.decode_call(data, 0) == call
    assert codec.decode_aside(data) is None and codec.decode_aside(codec.encode_stop(7)) == 7


@law(25)
@given(calls, sessions)
def test_what_a_stream_is_about_need_not_be_said_again(call: Any, session: int) -> None:
    named = dataclasses.replace(call, session=session)
    for each in (named, dataclasses.replace(call, session=0)):
        assert codec.decode_call(encoded(each), session) == named
    with pytest.raises(ProtocolError, match="no other"):
        codec.decode_call(encoded(named), session + 1)


@law(125)
@given(verdicts(), st.booleans(), st.none() | targets)
@example(Verdict(0, 0, 5), False, None)
def test_a_verdict_comes_back_with_all_it_says(verdict: Verdict, is_last: bool, target: TargetId | None) -> None:
    """Its audit, its cost and its mark."""
    data = codec.encode_verdict(verdict, target, is_last=is_last)
    decoded, *others = codec.decode_verdict(data, len(verdict.audit))
    assert (decoded, *others) == (verdict, is_last, target)
    assert decoded.cost == as_sent(verdict.cost)


@law(75)
@given(infos)
def test_server_info_and_the_end_of_writing_come_back(info: ServerInfo) -> None:
    assert codec.decode_verdict(codec.encode_stopped(Stopped(info.num_sessions))) == (None, True, None)
    assert decode_info(encode_info(info)) == info


def test_the_digest_is_the_crc_of_little_endian_words() -> None:
    token_ids = [0, 1, 151_643, MAX_ID]
    data = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert codec.digest(np.array(token_ids, np.int32)) == zlib.crc32(data)


def typical_call(**changes: Any) -> bytes:
    call = VerifyCall(2_000_000, 1, 260, (), (100_001, 100_002, 3_000, 40, 100_005), 0xDEADBEEF)
    return codec.encode_verify(dataclasses.replace(call, **changes))


def typical_verdict(num_audited: int = 0) -> bytes:
    cost = Cost(3, 6, 152.31, queue_ms=0.21)
    return codec.encode_verdict(Verdict(260, 3, 100_001, None, (True,) * num_audited, cost))


def test_a_typical_message_has_these_bytes_and_not_more() -> None:
    """A peer of another version reads these very bytes."""
    assert typical_call().hex() == "0880897a10011884022a0ca18d06a28d06b81728a58d0635efbeadde4001"
    assert typical_verdict(8).hex() == "088402100318a18d062a01ff3a050206ff76157001"
    opening = Opening("0123456789abcdef", Prompt(tuple(range(100_000, 100_040))))
    calls = typical_call(catch_up_ids=(100_000,) * 8), typical_call(base=0, opening=opening), typical_call(write=64)
    part = codec.encode_verdict(Verdict(260, 0, 100_001, cost=Cost(1, 1, 71.2)), is_first=False)
    others = typical_verdict(), part, codec.encode_stop(260), codec.encode_close(2_000_000)
    assert [len(each) for each in (*calls, *others)] == [56, 162, 32, 18, 13, 5, 6]


def test_the_protocol_has_every_decoding_option_and_refuses_others() -> None:
    names = {field.name for field in dataclasses.fields(DecodingParams)}
    assert set(pb.DecodingParams.DESCRIPTOR.fields_by_name) == names
    opening = Opening("0" * 16, Prompt((1, 2)), params=DecodingParams(temperature=0.5))
    message = pb.SessionRequest.FromString(codec.encode_open(OpenCall(1, 0, opening)))
    message.opening.params.MergeFromString(b"\xa0\x06\x01")  # field 100
    with pytest.raises(ProtocolError, match="older version does not know"):
        codec.decode_call(message.SerializeToString(), 0)


@law(60)
@given(any_message, st.randoms(use_true_random=False))
def test_decoding_is_total_over_truncated_and_damaged_messages(message: bytes, rng: random.Random) -> None:
    read_all(message)
    for _ in range(20):
        cut = rng.randrange(len(message) + 1)
        for damaged in (message[:cut], message[cut:], flipped(message, rng)):
            read_all(damaged)


def opening_with(session: int = 1, **fields: Any) -> bytes:
    opening = pb.Opening(**{"prompt_ids": [1, 2], **fields})
    return pb.SessionRequest(session=session, epoch=1, opening=opening, action=pb.ACTION_OPEN).SerializeToString()


HEARD = {"num_mels": 4, "features": b"\x00" * 24}


def heard(**fields: Any) -> bytes:
    """An opening with three frames of four mels."""
    return opening_with(media=[{**HEARD, **fields}])


def call_with(**fields: Any) -> bytes:
    given = {"session": 1, "epoch": 1, "base": 9, "digest": 5, "action": pb.ACTION_VERIFY, **fields}
    return pb.SessionRequest(**given).SerializeToString()


def reply_with(**fields: Any) -> bytes:
    return pb.SessionReply(**{"base": 9, "token_id": 5, "first": True, **fields}).SerializeToString()


verdict_on_9 = partial(codec.decode_verdict, num_audited=9)
read_call = partial(codec.decode_call, session=0)
REFUSED: list[tuple[str, Callable[[bytes], Any], bytes]] = [
    ("an id beyond 31 bits in a prompt", read_call, opening_with(prompt_ids=[2**31])),
    ("no tokens to write", read_call, opening_with(params={"max_new_tokens": 0})),
    ("an n-gram of 2^32 - 1", read_call, opening_with(params={"no_repeat_ngram_size": UINT32})),
    ("features of no mels", read_call, opening_with(media=[{"features": b"\x00" * 24}])),
    ("features that fill no frame", read_call, heard(num_mels=5)),
    ("too many recordings", read_call, opening_with(media=[HEARD] * 257)),
    ("half a feature", read_call, heard(features=b"\x00" * 23)),
    ("an id beyond 31 bits in a draft", read_call, call_with(draft_ids=[1, 2**31])),
    ("an id beyond 31 bits to catch up", read_call, call_with(catch_up_ids=[2**31])),
    ("an opening of another length", read_call, call_with(opening={"committed_ids": [1] * 8})),
    ("an opening that counts its prompt", read_call, call_with(opening={"prompt_ids": [1] * 9})),
    ("an opening without the catch-up", read_call,
     call_with(opening={"committed_ids": [1] * 9}, catch_up_ids=[1])),
    ("more audit than asked for", partial(codec.decode_verdict, num_audited=0), reply_with(audit=b"\x00")),
    ("a bit of audit too many", verdict_on_9, reply_with(audit=b"\xff\xc0")),
    ("an unknown finish", verdict_on_9, reply_with(audit=b"\xff\x80", finish=5)),
    ("a token beyond 31 bits", verdict_on_9, reply_with(audit=b"\xff\x80", token_id=2**31)),
    ("neither token nor finish", verdict_on_9, reply_with(audit=b"\xff\x80", token_id=None)),
    *((f"a draft judged, {says}", partial(codec.decode_verdict, drafts={1: Draft(1, 3, (5, 6))}),
       pb.SessionReply(base=3, num_fed=2, first=True, **fields).SerializeToString()) for says, fields in [
        ("and no token", {"branch": 1, "num_accepted": 2}), ("twice", {"branch": 1, "num_accepted": 3, "token_id": 1}),
        ("of no branch", {"branch": 2, "token_id": 1}),
    ]),
    ("a cost of nine parts", codec.decode_opened, pb.SessionReply(cost=[1] * 9).SerializeToString()),
    ("an unknown execution", decode_info, pb.GetInfoReply(execution=3).SerializeToString()),
]  # fmt: skip


@pytest.mark.parametrize(("decode", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_breaks_an_invariant_is_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(UsageError) as raised:
        decode(data)
    assert "\n" not in str(raised.value)


def test_lists_that_are_longer_than_the_context_are_no_defect_of_the_message() -> None:
    opened = [opening_with(prompt_ids=[1] * 21), opening_with(committed_ids=[1] * 21)]
    for data in (*opened, call_with(catch_up_ids=[1] * 21, base=21), call_with(draft_ids=[1] * 21)):
        assert codec.decode_call(data, 0, 21)
        with pytest.raises(LimitExceeded):
            codec.decode_call(data, 0, 20)


def test_parameters_that_were_left_out_have_the_values_that_the_proto_names_for_ever() -> None:
    encoded = codec.encode_open(OpenCall(1, 1, Opening("", Prompt((1, 2)))))
    assert encoded == opening_with() and not pb.SessionRequest.FromString(encoded).opening.HasField("params")
    call = read_call(opening_with())
    assert call.opening.params == DecodingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, repetition_penalty=1.0, no_repeat_ngram_size=0,
        content_penalty=1.0, content_ngram_size=0, no_adjacent_repeat=False, comma_gap=0, full_stop_gap=0,
        full_stop_shift=-8.0, sentences=0, min_new_tokens=0, stop=(), max_new_tokens=128,
    )  # fmt: skip
