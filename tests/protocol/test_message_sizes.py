"""Sizes and field numbers of messages: none grows unnoticed, and a peer of another version reads these bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from skydraft.config import DecodingParams
from skydraft.errors import ProtocolError
from skydraft.protocol import codec
from skydraft.protocol import verifier_pb2 as pb
from skydraft.protocol.values import Emission, Opening, SessionCall, VerifyCall
from skydraft.types import Cost, Prompt, Verdict


def typical_call(**changes: Any) -> bytes:
    call = VerifyCall(2_000_000, 1, 260, (), (100_001, 100_002, 3_000, 40, 100_005), 0xDEADBEEF)
    return codec.encode_verify_call(dataclasses.replace(call, **changes))


def typical_verdict(num_audited: int = 0) -> bytes:
    cost = Cost(3, 6, 152.31, queue_ms=0.21)
    return codec.encode_verdict(Verdict(260, 3, 100_001, None, (True,) * num_audited, (), cost))


PROMPT = Opening("0123456789abcdef", Prompt(tuple(range(100_000, 100_040))))
SIZES = [
    ("five drafts", typical_call(), 28),
    ("five drafts and eight tokens to catch up", typical_call(catch_up_ids=(100_000,) * 8), 54),
    ("five drafts that open a session", typical_call(base=0, opening=PROMPT), 160),
    ("a verdict on them", typical_verdict(), 16),
    ("a verdict and an audit of eight", typical_verdict(8), 19),
    ("one token of a stream", codec.encode_emission(Emission(260, (100_001,), None, Cost(1, 1, 71.2))), 14),
    ("a close", codec.encode_close(2_000_000), 4),
]


@pytest.mark.parametrize(("data", "num_bytes"), [row[1:] for row in SIZES], ids=[row[0] for row in SIZES])
def test_a_typical_message_has_this_many_bytes(data: bytes, num_bytes: int) -> None:
    assert len(data) == num_bytes


def test_the_numbers_of_the_fields_stay_what_they_are() -> None:
    """A peer of another version reads these very bytes."""
    assert typical_call().hex() == "0880897a10011884022a0ca18d06a28d06b81728a58d0635efbeadde"
    assert typical_verdict(8).hex() == "088402100318a18d062a01ff3a050206ff7615"


def test_the_protocol_has_every_decoding_option_and_no_other() -> None:
    assert set(pb.DecodingParams.DESCRIPTOR.fields_by_name) == {
        field.name for field in dataclasses.fields(DecodingParams)
    }


def test_a_decoding_option_that_this_version_does_not_know_is_refused() -> None:
    opening = Opening("0" * 16, Prompt((1, 2)), params=DecodingParams(temperature=0.5))
    data = codec.encode_session_call(SessionCall(1, 0, opening))
    message = pb.OpenRequest.FromString(data)
    message.opening.params.MergeFromString(b"\xa0\x06\x01")  # field 100
    with pytest.raises(ProtocolError, match="older version does not know"):
        codec.decode_session_call(message.SerializeToString())
