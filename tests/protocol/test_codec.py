"""Laws of the codec: what was encoded comes back, all else is a ProtocolError, and no message grows unnoticed."""

from __future__ import annotations

import dataclasses
import math
import random
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.errors import ProtocolError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Emission, Opened, Opening, ServerInfo, SessionCall, VerifyCall
from skydraft.types import Verdict, VerifyCost
from tests.decoding.toys import law

UINT32 = 2**32 - 1
MAX_ID = 2**31 - 1
numbers = st.integers(0, UINT32)
few_ids = st.lists(st.integers(0, 200_000) | st.just(MAX_ID), max_size=12).map(tuple)
texts = st.text(max_size=12)
finishes = st.sampled_from([None, "eos", "stop_string", "sentences", "length"])
fingerprints = st.binary(max_size=8).map(bytes.hex)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False)


any_params = st.builds(
    DecodingParams,
    temperature=st.just(0.0) | between(1e-6, 100),
    top_k=st.integers(0, MAX_ID),
    top_p=between(1e-9, 1),
    min_p=between(0, 1),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=between(1e-6, 1e6),
    no_repeat_ngram_size=st.integers(0, 1024),
    content_penalty=between(1e-6, 1e6),
    content_ngram_size=st.integers(0, 1024),
    no_adjacent_repeat=st.booleans(),
    comma_gap=st.integers(0, 1024),
    full_stop_gap=st.integers(0, 1024),
    full_stop_shift=between(-1e6, 0),
    sentences=st.integers(0, MAX_ID),
    min_new_tokens=st.integers(0, MAX_ID),
    stop=st.lists(st.text(min_size=1, max_size=8), max_size=3).map(tuple),
    max_new_tokens=st.integers(1, MAX_ID),
)
openings = st.builds(
    Opening,
    fingerprint=fingerprints,
    prompt_ids=few_ids,
    committed_ids=few_ids,
    params=st.just(DecodingParams()) | any_params,
    top=numbers,
    model=texts,
)
session_calls = st.builds(SessionCall, session=numbers, epoch=numbers, opening=openings)
costs = st.builds(
    VerifyCost,
    num_passes=st.integers(1, 2**32),
    num_rows=numbers,
    forward_ms=between(0, 4e7),
    prefill_ms=between(0, 4e7),
    queue_ms=between(0, 4e7),
)
emissions = st.builds(Emission, base=numbers.filter(bool), token_ids=few_ids.filter(bool), finish=finishes, cost=costs)
infos = st.builds(
    ServerInfo,
    version=texts,
    model=texts,
    fingerprint=fingerprints,
    vocab_size=numbers,
    context_len=numbers,
    execution=st.sampled_from(["exact", "throughput"]),
    max_rows=numbers,
    max_block=numbers,
    max_sessions=numbers,
    num_sessions=numbers,
    invariant_rows=numbers,
    forward_ms=st.lists(between(0, 4e6), max_size=6).map(tuple),
)


@st.composite
def verify_calls(draw: st.DrawFn) -> VerifyCall:
    catch_up, opening = draw(few_ids), draw(st.none() | openings.filter(lambda opening: opening.base > 0))
    before = opening.base if opening else draw(st.integers(1, UINT32 - len(catch_up)))
    session, epoch, digest = draw(numbers), draw(numbers), draw(numbers)
    return VerifyCall(session, epoch, before + len(catch_up), catch_up, draw(few_ids), digest, opening)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Any verdict: with or without a token, any finish, an audit of any length."""
    num_accepted, finish = draw(st.integers(0, 40) | numbers), draw(finishes)
    may_lack_token = finish is not None and num_accepted > 0
    token_id = draw(st.integers(0, MAX_ID) | st.none()) if may_lack_token else draw(st.integers(0, MAX_ID))
    audit = tuple(draw(st.lists(st.booleans(), max_size=40)))
    ranks = tuple(draw(numbers) for agreed in audit if not agreed)
    return Verdict(draw(st.integers(1, UINT32)), num_accepted, token_id, finish, audit, ranks, draw(costs))


def as_sent(cost: VerifyCost) -> VerifyCost:
    """Times as they cross the wire: in units of 10 microseconds."""
    times = {name: round(getattr(cost, name) * 100) / 100 for name in ("forward_ms", "prefill_ms", "queue_ms")}
    return dataclasses.replace(cost, **times)


@law(250)
@given(session_calls)
@example(SessionCall(0, 0, Opening("", (), params=DecodingParams(full_stop_shift=0.0))))  # a zero, but no default
def test_an_opening_comes_back_with_any_parameters(call: SessionCall) -> None:
    assert codec.decode_session_call(codec.encode_session_call(call)) == call


@law(200)
@given(verify_calls())
def test_a_verify_call_comes_back(call: VerifyCall) -> None:
    assert codec.decode_verify_call(codec.encode_verify_call(call)) == call


@law(250)
@given(verdicts())
def test_a_verdict_comes_back_with_its_audit_and_its_cost(verdict: Verdict) -> None:
    decoded = codec.decode_verdict(codec.encode_verdict(verdict), len(verdict.audit))
    assert decoded == verdict
    assert decoded.cost == as_sent(verdict.cost)


@law(100)
@given(emissions)
def test_an_emission_comes_back(emission: Emission) -> None:
    decoded = codec.decode_emission(codec.encode_emission(emission))
    assert decoded == dataclasses.replace(emission, cost=as_sent(emission.cost))


@law(100)
@given(infos)
def test_server_info_comes_back_with_times_to_a_microsecond(info: ServerInfo) -> None:
    forward_ms = tuple(round(ms * 1e3) / 1e3 for ms in info.forward_ms)
    assert codec.decode_info(codec.encode_info(info)) == dataclasses.replace(info, forward_ms=forward_ms)


@law(50)
@given(numbers.filter(bool))
def test_a_length_and_a_close_come_back(number: int) -> None:
    opened = Opened(number, prefill_ms=71.25)
    decoded = codec.decode_opened(codec.encode_opened(opened))
    assert (decoded.base, decoded.prefill_ms) == (number, 71.25)
    assert codec.decode_close(codec.encode_close(number)) == number


# How each message is read, and written again.
Reader = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]
READERS: dict[str, Reader] = {
    "session call": (codec.decode_session_call, codec.encode_session_call),
    "verify call": (codec.decode_verify_call, codec.encode_verify_call),
    "verdict on 0": (partial(codec.decode_verdict, num_audited=0), codec.encode_verdict),
    "verdict on 11": (partial(codec.decode_verdict, num_audited=11), codec.encode_verdict),
    "emission": (codec.decode_emission, codec.encode_emission),
    "info": (codec.decode_info, codec.encode_info),
    "opened": (codec.decode_opened, codec.encode_opened),
    "close": (codec.decode_close, codec.encode_close),
}


def assert_valid(value: Any) -> None:
    """What `__post_init__` and the server rely on."""
    if isinstance(value, SessionCall | VerifyCall) and value.opening:
        dataclasses.replace(value.opening.params)  # checks itself again
        assert all(0 <= token_id <= MAX_ID for token_id in value.opening.prompt_ids + value.opening.committed_ids)
    if isinstance(value, VerifyCall):
        assert value.block.base == value.base > len(value.catch_up_ids)
        assert value.opening is None or value.opening.base + len(value.catch_up_ids) == value.base
        assert all(0 <= token_id <= MAX_ID for token_id in value.catch_up_ids + value.draft_ids)
    if isinstance(value, Verdict):
        dataclasses.replace(value)
        assert len(value.audit) in (0, 11) and (value.token_id is None or 0 <= value.token_id <= MAX_ID)
    if isinstance(value, Emission):
        assert all(0 <= token_id <= MAX_ID for token_id in value.token_ids)


def read_all(data: bytes) -> int:
    """Let every decoder read `data`; returns how many took it. Fails on an error that is no ProtocolError."""
    num_taken = 0
    for name, (decode, encode) in READERS.items():
        try:
            value = decode(data)
        except ProtocolError:
            continue
        num_taken += 1
        assert_valid(value)
        assert decode(encode(value)) == value, name
    return num_taken


def messages() -> Iterator[bytes]:
    """One of each, with all fields set."""
    params = DecodingParams(0.8, 40, 0.9, 0.05, 2**63, 1.1, 3, 1.2, 2, True, 4, 8, -6.0, 2, 16, ("。\n", "ab"), 300)
    opening = Opening("0123456789abcdef", (5, 151_643, 9), (1, 2), params, 3, "toy")
    cost = VerifyCost(3, 17, 71.27, 40.0, 1.5)
    audit = (True, False, True, True, True, True, True, True, False, True, True)
    yield codec.encode_session_call(SessionCall(2_000_000, 7, opening))
    yield codec.encode_verify_call(VerifyCall(2_000_000, 7, 7, (8, 9), (1, 2, 3), 0xDEADBEEF, opening))
    yield codec.encode_verdict(Verdict(400, 3, 151_643, "sentences", audit, (1, 700), cost))
    yield codec.encode_verdict(Verdict(400, 3, None, "stop_string", cost=cost))
    yield codec.encode_emission(Emission(300, (5, 70_000), "eos", cost))
    info = ServerInfo("0.1", "toy", "0123456789abcdef", 9, 4096, "throughput", 8, 32, 8, 1, 2, (0.5, 7.125))
    yield codec.encode_info(info)
    yield codec.encode_opened(Opened(300, 12.5))


def test_decoding_is_total_over_truncated_and_damaged_messages() -> None:
    rng = random.Random(3)
    num_inputs = num_taken = 0
    for message in messages():
        flips = [(at, 1 << bit) for at in range(len(message)) for bit in range(8)]
        for cut in range(len(message)):
            num_taken += read_all(message[:cut]) + read_all(message[cut:])
            num_inputs += 2
        for at, mask in flips + rng.choices(flips, k=400):
            damaged = bytearray(message)
            damaged[at] ^= mask
            if rng.random() < 0.3:
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            num_taken += read_all(bytes(damaged))
            num_inputs += 1
    assert num_inputs > 6_000 and num_taken > 1_000  # the decoders that took something were tested too


def test_decoding_is_total_over_random_bytes() -> None:
    rng = random.Random(4)
    tags = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 10, 18, 26, 34, 42, 50, 58, 53]
    num_taken = 0
    for number in range(5_000):
        data = bytearray(rng.randbytes(rng.randrange(40)))
        if number % 2:  # something like fields, so that the parser gets further than the first byte
            data = bytearray(rng.choice([*tags, rng.randrange(256), 1, 2, 3]) for _ in data)
        num_taken += read_all(bytes(data))
    assert num_taken > 100


@law(300)
@given(st.sampled_from(list(messages())), st.binary(max_size=30), st.integers(0, 200))
def test_decoding_is_total_over_messages_with_something_put_in(message: bytes, extra: bytes, at: int) -> None:
    read_all(message[:at] + extra + message[at:])


def opening_with(**fields: Any) -> bytes:
    opening = pb.Opening(**{"prompt_ids": [1, 2], **fields})
    return pb.OpenRequest(session=1, epoch=1, opening=opening).SerializeToString()


def call_with(**fields: Any) -> bytes:
    return pb.VerifyRequest(**{"session": 1, "epoch": 1, "base": 9, "digest": 5, **fields}).SerializeToString()


def reply_with(**fields: Any) -> bytes:
    return pb.VerifyReply(**{"base": 9, "token_id": 5, **fields}).SerializeToString()


verdict_on_9 = partial(codec.decode_verdict, num_audited=9)
REFUSED: list[tuple[str, Callable[[bytes], Any], bytes]] = [
    ("a session call without an opening", codec.decode_session_call, pb.OpenRequest(session=1).SerializeToString()),
    ("an id beyond 31 bits in a prompt", codec.decode_session_call, opening_with(prompt_ids=[2**31])),
    ("an id beyond 31 bits that is committed", codec.decode_session_call, opening_with(committed_ids=[UINT32])),
    ("a temperature below 0", codec.decode_session_call, opening_with(params={"temperature": -1})),
    ("no temperature at all", codec.decode_session_call, opening_with(params={"temperature": math.nan})),
    ("an infinite shift", codec.decode_session_call, opening_with(params={"full_stop_shift": -math.inf})),
    ("no tokens to write", codec.decode_session_call, opening_with(params={"max_new_tokens": 0})),
    ("top_p 0", codec.decode_session_call, opening_with(params={"top_p": 0})),
    ("an empty stop string", codec.decode_session_call, opening_with(params={"stop": [""]})),
    ("an n-gram of 2^32 - 1", codec.decode_session_call, opening_with(params={"no_repeat_ngram_size": UINT32})),
    ("base 0", codec.decode_verify_call, call_with(base=0)),
    ("catch-up tokens and nothing before them", codec.decode_verify_call, call_with(base=2, catch_up_ids=[3, 4])),
    ("an id beyond 31 bits in a draft", codec.decode_verify_call, call_with(draft_ids=[1, 2**31])),
    ("an id beyond 31 bits to catch up", codec.decode_verify_call, call_with(catch_up_ids=[2**31])),
    ("an opening of another length", codec.decode_verify_call, call_with(opening={"prompt_ids": [1] * 8})),
    ("an opening without the catch-up", codec.decode_verify_call,
     call_with(opening={"prompt_ids": [1] * 9}, catch_up_ids=[1])),
    ("more audit than asked for", partial(codec.decode_verdict, num_audited=0), reply_with(audit=b"\x00")),
    ("a verdict on base 0", partial(codec.decode_verdict, num_audited=0), reply_with(base=0)),
    ("less audit than asked for", verdict_on_9, reply_with(audit=b"\xff")),
    ("a bit of audit too many", verdict_on_9, reply_with(audit=b"\xff\xc0")),
    ("a rank too few", verdict_on_9, reply_with(audit=b"\xff\x00")),
    ("a rank too many", verdict_on_9, reply_with(audit=b"\xff\x80", audit_ranks=[1])),
    ("an unknown finish", verdict_on_9, reply_with(audit=b"\xff\x80", finish=5)),
    ("a token beyond 31 bits", verdict_on_9, reply_with(audit=b"\xff\x80", token_id=2**31)),
    ("neither token nor finish", verdict_on_9, pb.VerifyReply(base=9, audit=b"\xff\x80").SerializeToString()),
    ("an unknown finish of a stream", codec.decode_emission, pb.GenerateReply(finish=77).SerializeToString()),
    ("an id of 32 bits in a stream", codec.decode_emission, pb.GenerateReply(token_ids=[2**31]).SerializeToString()),
    ("an unknown execution", codec.decode_info, pb.GetInfoReply(execution=3).SerializeToString()),
]  # fmt: skip


@pytest.mark.parametrize(("decode", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_breaks_an_invariant_is_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(data)
    assert "\n" not in str(raised.value)


def test_what_they_were_made_from_is_accepted() -> None:
    assert codec.decode_session_call(opening_with()).opening.prompt_ids == (1, 2)
    assert codec.decode_verify_call(call_with(opening={"prompt_ids": [1] * 8}, catch_up_ids=[1])).base == 9
    assert verdict_on_9(reply_with(audit=b"\xff\x00", audit_ranks=[UINT32])).audit == (True,) * 8 + (False,)


def test_nothing_at_all_is_neither_a_verdict_nor_an_execution_nor_a_call() -> None:
    for decode in (partial(codec.decode_verdict, num_audited=0), codec.decode_info, codec.decode_verify_call):
        with pytest.raises(ProtocolError):
            decode(b"")
    assert 0 not in codec._EXECUTIONS.values()
    assert [reason for reason, number in codec._FINISH.items() if number == 0] == [None]
    assert set(codec._FINISH.values()) == set(pb.Finish.values())


def test_parameters_that_were_left_out_have_the_values_that_the_proto_names_for_ever() -> None:
    assert codec._params_message(DecodingParams()).SerializeToString() == b""
    call = codec.decode_session_call(opening_with())
    assert call.opening.params == DecodingParams(
        temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, repetition_penalty=1.0, no_repeat_ngram_size=0,
        content_penalty=1.0, content_ngram_size=0, no_adjacent_repeat=False, comma_gap=0, full_stop_gap=0,
        full_stop_shift=-8.0, sentences=0, min_new_tokens=0, stop=(), max_new_tokens=128,
    )  # fmt: skip


def test_the_digest_is_the_crc_of_little_endian_words() -> None:
    token_ids = [0, 1, 151_643, MAX_ID]
    data = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert codec.digest(np.array(token_ids, np.int32)) == zlib.crc32(data)


@law(150)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=40), st.data())
def test_the_digest_tells_apart_another_id_another_order_and_another_length(
    ids: list[int], data: st.DataObject
) -> None:
    at, delta = data.draw(st.integers(0, len(ids) - 1)), data.draw(st.integers(1, 500))
    changed, moved = list(ids), list(ids)
    changed[at] += delta
    moved.append(moved.pop(at))
    own = codec.digest(np.array(ids, np.int32))
    assert own == codec.digest(np.array(ids, np.int64)) <= UINT32
    for other in (changed, moved, ids[:-1], [*ids, 0], [0, *ids]):
        assert (codec.digest(np.array(other, np.int32)) == own) == (other == ids)


def typical_call(**changes: Any) -> bytes:
    call = VerifyCall(2_000_000, 1, 300, (), (100_001, 100_002, 3_000, 40, 100_005), 0xDEADBEEF)
    return codec.encode_verify_call(dataclasses.replace(call, **changes))


def typical_verdict(num_audited: int = 0) -> bytes:
    cost = VerifyCost(3, 6, 152.31, 0.0, 0.21)
    return codec.encode_verdict(Verdict(300, 3, 100_001, None, (True,) * num_audited, (), cost))


PROMPT = Opening("0123456789abcdef", tuple(range(100_000, 100_040)))
SIZES = [
    ("five drafts", typical_call(), 28),
    ("five drafts and eight tokens to catch up", typical_call(catch_up_ids=(100_000,) * 8), 54),
    ("five drafts that open a session", typical_call(base=40, opening=PROMPT), 162),
    ("a verdict on them", typical_verdict(), 18),
    ("a verdict and an audit of eight", typical_verdict(8), 21),
    ("one token of a stream", codec.encode_emission(Emission(300, (100_001,), None, VerifyCost(1, 1, 71.2))), 13),
    ("a close", codec.encode_close(2_000_000), 4),
]


@pytest.mark.parametrize(("data", "num_bytes"), [row[1:] for row in SIZES], ids=[row[0] for row in SIZES])
def test_a_typical_message_has_this_many_bytes(data: bytes, num_bytes: int) -> None:
    assert len(data) == num_bytes


def test_the_numbers_of_the_fields_stay_what_they_are() -> None:
    """A peer of another version reads these very bytes."""
    assert typical_call().hex() == "0880897a100118ac022a0ca18d06a28d06b81728a58d0635efbeadde"
    assert typical_verdict(8).hex() == "08ac02100318a18d062a01ff3802400648ff765815"
