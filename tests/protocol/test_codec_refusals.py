"""What the codec makes of any bytes: a value that keeps every invariant, or a ProtocolError that says why not."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.errors import LimitExceeded, UsageError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import decode_info, encode_info
from skydraft.protocol.values import OpenCall, Opened, Opening, Stopped
from skydraft.types import Draft, Prompt
from tests.mutating import flipped
from tests.protocol.any_message import UINT32, calls, costs, encoded, infos, verdicts
from tests.toys import law

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
