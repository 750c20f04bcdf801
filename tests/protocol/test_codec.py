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
from skydraft.errors import GrammarRefused, ProtocolError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.info import decode_info, encode_info
from skydraft.protocol.values import Emission, Opened, Opening, ServerInfo, SessionCall, VerifyCall
from skydraft.types import Cost, Media, Prompt, Verdict
from tests.grammars import GRAMMARS
from tests.toys import law

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


_without_grammar = st.builds(
    DecodingParams,
    temperature=st.just(0.0) | between(1e-6, 100),
    top_k=st.integers(0, MAX_ID),
    top_p=between(1e-9, 1),
    min_p=between(0, 1),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=between(1e-6, 1e6),
    frequency_penalty=between(-2, 2),
    presence_penalty=between(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, MAX_ID), between(-100, 100), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
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
any_params = _without_grammar | st.builds(
    lambda params, grammar: dataclasses.replace(params, sentences=0, grammar=grammar),
    _without_grammar,
    st.sampled_from([*GRAMMARS, "json_object:", 'json_schema:{"const":"我们"}']),
)
# Features as they cross the wire: in half precision already.
media = st.builds(
    lambda num_mels, num_frames, value: Media(np.full((num_mels, num_frames), value, np.float16).astype(np.float32)),
    st.integers(1, 5),
    st.integers(3, 9),
    st.floats(-60_000, 60_000, width=16),
)
openings = st.builds(
    Opening,
    fingerprint=fingerprints,
    prompt=st.builds(Prompt, few_ids, st.lists(media, max_size=3).map(tuple)),
    committed_ids=few_ids,
    params=st.just(DecodingParams()) | any_params,
    top=numbers,
    model=texts,
    cache_scope=texts,
)
session_calls = st.builds(SessionCall, session=sessions, epoch=numbers, opening=openings)
times = {name: between(0, 4e7) for name in ("forward_ms", "prefill_ms", "encode_ms", "queue_ms")}
costs = st.one_of(
    # of a prompt, or of nothing: no rows
    st.builds(Cost, num_passes=st.just(0) | numbers, num_cached=st.just(0) | numbers, **times),
    st.builds(Cost, num_passes=st.integers(1, 2**32), num_rows=numbers.filter(bool), **times),
)
emissions = st.builds(Emission, base=numbers, token_ids=few_ids.filter(bool), finish=finishes, cost=costs)
sizes = numbers.filter(bool)
infos = st.builds(
    ServerInfo,
    version=texts,
    model=texts,
    fingerprint=fingerprints,
    vocab_size=sizes,
    context_len=sizes,
    execution=st.sampled_from(["exact", "throughput"]),
    max_rows=sizes,
    max_block=sizes,
    max_sessions=sizes,
    num_sessions=numbers,
    invariant_rows=numbers,
    forward_ms=st.lists(between(0.001, 4e6), min_size=1, max_size=6).map(tuple),
    weights=texts,
)


@st.composite
def verify_calls(draw: st.DrawFn) -> VerifyCall:
    catch_up, opening = draw(few_ids), draw(st.none() | openings)
    before = len(opening.committed_ids) if opening else draw(st.integers(0, 3) | st.integers(0, UINT32 - len(catch_up)))
    session, epoch, digest = draw(sessions), draw(numbers), draw(numbers)
    return VerifyCall(session, epoch, before + len(catch_up), catch_up, draw(few_ids), digest, opening)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """Any verdict: with or without a token, any finish, an audit of any length."""
    num_accepted, finish = draw(st.integers(0, 40) | numbers), draw(finishes)
    may_lack_token = finish is not None and num_accepted > 0
    token_id = draw(st.integers(0, MAX_ID) | st.none()) if may_lack_token else draw(st.integers(0, MAX_ID))
    audit = tuple(draw(st.lists(st.booleans(), max_size=40)))
    ranks = tuple(draw(numbers) for agreed in audit if not agreed)
    return Verdict(draw(numbers), num_accepted, token_id, finish, audit, ranks, draw(costs))


def as_sent(cost: Cost) -> Cost:
    """Times as they cross the wire: in units of 10 microseconds."""
    return dataclasses.replace(cost, **{name: round(getattr(cost, name) * 100) / 100 for name in times})


@law(250)
@given(session_calls)
@example(SessionCall(1, 0, Opening("", Prompt(()), params=DecodingParams(full_stop_shift=0.0))))  # 0, but no default
def test_an_opening_comes_back_with_any_parameters(call: SessionCall) -> None:
    assert codec.decode_session_call(codec.encode_session_call(call)) == call


@law(200)
@given(verify_calls())
@example(VerifyCall(1, 0, 0, (), (5, 6), 7))  # right after the prompt
@example(VerifyCall(1, 0, 2, (8, 9), (), 7))  # all that was generated is caught up
def test_a_verify_call_comes_back(call: VerifyCall) -> None:
    assert codec.decode_verify_call(codec.encode_verify_call(call)) == call


@law(250)
@given(verdicts())
@example(Verdict(0, 0, 5))
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
    assert decode_info(encode_info(info)) == dataclasses.replace(info, forward_ms=forward_ms)


@law(200)
@given(costs, st.integers(0, 12) | numbers)
@example(Cost(), 0)
@example(Cost(1, 1), 0)
@example(Cost(num_passes=2**32, num_rows=UINT32, forward_ms=42_949_672.95, queue_ms=0.01), UINT32)
def test_a_cost_comes_back_in_all_three_replies(cost: Cost, base: int) -> None:
    opened = codec.decode_opened(codec.encode_opened(Opened(base, cost)))
    verdict = codec.decode_verdict(codec.encode_verdict(Verdict(base, 0, 5, cost=cost)), 0)
    emission = codec.decode_emission(codec.encode_emission(Emission(base, (5,), cost=cost)))
    for reply in (opened, verdict, emission):
        assert (reply.base, reply.cost) == (base, as_sent(cost))


def test_rows_without_a_pass_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError):
        codec.encode_opened(Opened(3, Cost(num_passes=0, num_rows=1)))


@law(50)
@given(numbers)
def test_a_close_comes_back(number: int) -> None:
    assert codec.decode_close(codec.encode_close(number)) == number


# How each message is read, and written again.
Reader = tuple[Callable[[bytes], Any], Callable[[Any], bytes]]
READERS: dict[str, Reader] = {
    "session call": (codec.decode_session_call, codec.encode_session_call),
    "verify call": (codec.decode_verify_call, codec.encode_verify_call),
    "verdict on 0": (partial(codec.decode_verdict, num_audited=0), codec.encode_verdict),
    "verdict on 11": (partial(codec.decode_verdict, num_audited=11), codec.encode_verdict),
    "emission": (codec.decode_emission, codec.encode_emission),
    "info": (decode_info, encode_info),
    "opened": (codec.decode_opened, codec.encode_opened),
    "close": (codec.decode_close, codec.encode_close),
}


def assert_valid(value: Any) -> None:
    """What `__post_init__` and the server rely on."""
    if isinstance(value, SessionCall | VerifyCall) and value.opening:
        dataclasses.replace(value.opening.params)  # checks itself again
        ids = value.opening.prompt.token_ids + value.opening.committed_ids
        assert len(ids) == value.opening.num_ids and all(0 <= token_id <= MAX_ID for token_id in ids)
        assert all(media.num_tokens > 0 for media in value.opening.prompt.media)
    if isinstance(value, SessionCall | VerifyCall):
        assert value.session > 0
    if isinstance(value, VerifyCall):
        assert value.block.base == value.base >= len(value.catch_up_ids)
        assert value.opening is None or len(value.opening.committed_ids) + len(value.catch_up_ids) == value.base
        assert all(0 <= token_id <= MAX_ID for token_id in value.catch_up_ids + value.draft_ids)
    if isinstance(value, Verdict):
        dataclasses.replace(value)
        assert len(value.audit) in (0, 11) and (value.token_id is None or 0 <= value.token_id <= MAX_ID)
    if isinstance(value, Emission):
        assert all(0 <= token_id <= MAX_ID for token_id in value.token_ids)


def read_all(data: bytes) -> int:
    """Let every decoder read `data`; returns how many took it. Fails on an error that says something else."""
    num_taken = 0
    for name, (decode, encode) in READERS.items():
        try:
            value = decode(data)
        except (ProtocolError, GrammarRefused):
            continue
        num_taken += 1
        assert_valid(value)
        assert decode(encode(value)) == value, name
    return num_taken


def messages() -> Iterator[bytes]:
    """One of each, with all fields set."""
    params = DecodingParams(
        temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, seed=2**63, repetition_penalty=1.1, no_repeat_ngram_size=3,
        content_penalty=1.2, content_ngram_size=2, no_adjacent_repeat=True, comma_gap=4, full_stop_gap=8,
        full_stop_shift=-6.0, sentences=2, min_new_tokens=16, stop=("。\n", "ab"), max_new_tokens=300,
    )  # fmt: skip
    heard = Media(np.arange(12, dtype=np.float32).reshape(2, 6))
    opening = Opening("0123456789abcdef", Prompt((5, 151_643, 9), (heard, heard)), (1, 2), params, 3, "toy")
    cost = Cost(3, 17, 71.27, 40.0, 8.25, 1.5)
    audit = (True, False, True, True, True, True, True, True, False, True, True)
    yield codec.encode_session_call(SessionCall(2_000_000, 7, opening))
    yield codec.encode_verify_call(VerifyCall(2_000_000, 7, 4, (8, 9), (1, 2, 3), 0xDEADBEEF, opening))
    yield codec.encode_verdict(Verdict(400, 3, 151_643, "sentences", audit, (1, 700), cost))
    yield codec.encode_verdict(Verdict(400, 3, None, "stop_string", cost=cost))
    yield codec.encode_emission(Emission(300, (5, 70_000), "eos", cost))
    info = ServerInfo("0.1", "toy", "0123456789abcdef", 9, 4096, "throughput", 8, 32, 8, 1, 2, (0.5, 7.125), "aa")
    yield encode_info(info)
    yield codec.encode_opened(Opened(300, cost))


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


def opening_with(session: int = 1, **fields: Any) -> bytes:
    opening = pb.Opening(**{"prompt_ids": [1, 2], **fields})
    return pb.OpenRequest(session=session, epoch=1, opening=opening).SerializeToString()


HEARD = {"num_mels": 4, "features": b"\x00" * 24}


def heard(**fields: Any) -> bytes:
    """An opening with three frames of four mels."""
    return opening_with(media=[{**HEARD, **fields}])


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
    ("an opening of no session", codec.decode_session_call, opening_with(session=0)),
    ("features of no mels", codec.decode_session_call, opening_with(media=[{"features": b"\x00" * 24}])),
    ("features that fill no frame", codec.decode_session_call, heard(num_mels=5)),
    ("too many recordings", codec.decode_session_call, opening_with(media=[HEARD] * 257)),
    ("half a feature", codec.decode_session_call, heard(features=b"\x00" * 23)),
    ("audio too short for a token", codec.decode_session_call, heard(num_mels=6)),
    ("a feature that is no number", codec.decode_session_call, heard(features=b"\x00\x7e" * 12)),
    ("a call for no session", codec.decode_verify_call, call_with(session=0)),
    ("catch-up tokens on base 0", codec.decode_verify_call, call_with(base=0, catch_up_ids=[3])),
    ("more catch-up tokens than the base holds", codec.decode_verify_call, call_with(base=2, catch_up_ids=[3, 4, 5])),
    ("an id beyond 31 bits in a draft", codec.decode_verify_call, call_with(draft_ids=[1, 2**31])),
    ("an id beyond 31 bits to catch up", codec.decode_verify_call, call_with(catch_up_ids=[2**31])),
    ("an opening of another length", codec.decode_verify_call, call_with(opening={"committed_ids": [1] * 8})),
    ("an opening that counts its prompt", codec.decode_verify_call, call_with(opening={"prompt_ids": [1] * 9})),
    ("an opening without the catch-up", codec.decode_verify_call,
     call_with(opening={"committed_ids": [1] * 9}, catch_up_ids=[1])),
    ("more audit than asked for", partial(codec.decode_verdict, num_audited=0), reply_with(audit=b"\x00")),
    ("less audit than asked for", verdict_on_9, reply_with(audit=b"\xff")),
    ("a bit of audit too many", verdict_on_9, reply_with(audit=b"\xff\xc0")),
    ("a rank too few", verdict_on_9, reply_with(audit=b"\xff\x00")),
    ("a rank too many", verdict_on_9, reply_with(audit=b"\xff\x80", audit_ranks=[1])),
    ("an unknown finish", verdict_on_9, reply_with(audit=b"\xff\x80", finish=5)),
    ("a token beyond 31 bits", verdict_on_9, reply_with(audit=b"\xff\x80", token_id=2**31)),
    ("neither token nor finish", verdict_on_9, pb.VerifyReply(base=9, audit=b"\xff\x80").SerializeToString()),
    ("an unknown finish of a stream", codec.decode_emission,
     pb.GenerateReply(token_ids=[1], finish=77).SerializeToString()),
    ("no tokens of a stream", codec.decode_emission, pb.GenerateReply(base=3).SerializeToString()),
    ("an id of 32 bits in a stream", codec.decode_emission, pb.GenerateReply(token_ids=[2**31]).SerializeToString()),
    ("an unknown execution", decode_info, pb.GetInfoReply(execution=3).SerializeToString()),
]  # fmt: skip


@pytest.mark.parametrize(("decode", "data"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_breaks_an_invariant_is_refused(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode(data)
    assert "\n" not in str(raised.value)


def test_what_they_were_made_from_is_accepted() -> None:
    assert codec.decode_session_call(opening_with()).opening.prompt == Prompt((1, 2))
    assert codec.decode_session_call(heard()).opening.prompt.media == (Media(np.zeros((4, 3), np.float32)),)
    assert codec.decode_verify_call(call_with(opening={"committed_ids": [1] * 8}, catch_up_ids=[1])).base == 9
    assert codec.decode_verify_call(call_with(base=2, catch_up_ids=[3, 4])).catch_up_ids == (3, 4)
    assert codec.decode_verify_call(call_with(base=0, opening={"prompt_ids": [1] * 9})).base == 0
    assert codec.decode_verdict(reply_with(base=0), 0).base == 0
    assert codec.decode_emission(pb.GenerateReply(token_ids=[1]).SerializeToString()).base == 0
    assert verdict_on_9(reply_with(audit=b"\xff\x00", audit_ranks=[UINT32])).audit == (True,) * 8 + (False,)


def test_nothing_at_all_is_neither_a_verdict_nor_an_execution_nor_a_call() -> None:
    decoders = (decode_info, codec.decode_verify_call, codec.decode_session_call, codec.decode_emission)
    for decode in (partial(codec.decode_verdict, num_audited=0), *decoders):
        with pytest.raises(ProtocolError):
            decode(b"")


def test_each_number_of_a_finish_is_one_reason_and_0_is_none() -> None:
    reasons = [codec.decode_verdict(reply_with(finish=number), 0).finish for number in sorted(pb.Finish.values())]
    assert reasons == [None, "eos", "stop_string", "sentences", "length"]


def test_parameters_that_were_left_out_have_the_values_that_the_proto_names_for_ever() -> None:
    written = codec.encode_session_call(SessionCall(1, 1, Opening("", Prompt((1, 2)))))
    assert written == opening_with() and not pb.OpenRequest.FromString(written).opening.HasField("params")
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


@law(100)
@given(st.lists(st.lists(st.integers(0, MAX_ID), max_size=8), max_size=4))
def test_the_digest_of_parts_is_that_of_the_whole(parts: list[list[int]]) -> None:
    whole = np.array([token_id for part in parts for token_id in part], np.int32)
    assert codec.digest(*(np.array(part, np.int32) for part in parts)) == codec.digest(whole)


def test_the_laws_of_the_codec_are_asked_of_every_decoding_option() -> None:
    seen: dict[str, set[Any]] = {field.name: set() for field in dataclasses.fields(DecodingParams)}

    @law(200)
    @given(any_params)
    def collect(params: DecodingParams) -> None:
        for name, values in seen.items():
            values.add(getattr(params, name))

    collect()
    assert [name for name, values in seen.items() if len(values) < 2] == []
