"""Laws of the codec: what was encoded comes back, the digest tells texts apart, and no message grows unnoticed."""

import dataclasses
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skydraft.config import DecodingParams
from skydraft.errors import ProtocolError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.codec import decode_info, encode_info
from skydraft.protocol.values import OpenCall, Opening, ServerInfo, Stopped, TargetId, VerifyCall
from skydraft.types import Cost, Prompt, Verdict
from tests.protocol.any_message import MAX_ID, Call, as_sent, calls, encoded, infos, sessions, targets, verdicts
from tests.toys import law


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
