"""Laws of the codec: what was encoded comes back, and the digest tells a text from those that nearly are it."""

from __future__ import annotations

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
from skydraft.protocol.info import decode_info, encode_info
from skydraft.protocol.values import Emission, Opened, Opening, ServerInfo, SessionCall, VerifyCall
from skydraft.types import Cost, Prompt, Verdict
from tests.protocol.any_message import (
    MAX_ID,
    UINT32,
    any_params,
    as_sent,
    costs,
    emissions,
    infos,
    numbers,
    session_calls,
    verdicts,
    verify_calls,
)
from tests.toys import law


@law(125)
@given(session_calls)
@example(SessionCall(1, 0, Opening("", Prompt(()), params=DecodingParams(full_stop_shift=0.0))))  # 0, but no default
def test_an_opening_comes_back_with_any_parameters(call: SessionCall) -> None:
    assert codec.decode_session_call(codec.encode_session_call(call)) == call


@law(100)
@given(verify_calls())
@example(VerifyCall(1, 0, 0, (), (5, 6), 7))  # right after the prompt
@example(VerifyCall(1, 0, 2, (8, 9), (), 7))  # all that was generated is caught up
def test_a_verify_call_comes_back(call: VerifyCall) -> None:
    assert codec.decode_verify_call(codec.encode_verify_call(call)) == call


@law(125)
@given(verdicts())
@example(Verdict(0, 0, 5))
def test_a_verdict_comes_back_with_its_audit_and_its_cost(verdict: Verdict) -> None:
    decoded = codec.decode_verdict(codec.encode_verdict(verdict), len(verdict.audit))
    assert decoded == verdict
    assert decoded.cost == as_sent(verdict.cost)


@law(50)
@given(emissions)
def test_an_emission_comes_back(emission: Emission) -> None:
    decoded = codec.decode_emission(codec.encode_emission(emission))
    assert decoded == dataclasses.replace(emission, cost=as_sent(emission.cost))


@law(50)
@given(infos)
def test_server_info_comes_back_with_times_to_a_microsecond(info: ServerInfo) -> None:
    forward_ms = tuple(round(ms * 1e3) / 1e3 for ms in info.forward_ms)
    assert decode_info(encode_info(info)) == dataclasses.replace(info, forward_ms=forward_ms)


@law(100)
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


@law(25)
@given(numbers)
def test_a_close_comes_back(number: int) -> None:
    assert codec.decode_close(codec.encode_close(number)) == number


def test_the_digest_is_the_crc_of_little_endian_words() -> None:
    token_ids = [0, 1, 151_643, MAX_ID]
    data = b"".join(token_id.to_bytes(4, "little") for token_id in token_ids)
    assert codec.digest(np.array(token_ids, np.int32)) == zlib.crc32(data)


@law(75)
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


@law(50)
@given(st.lists(st.lists(st.integers(0, MAX_ID), max_size=8), max_size=4))
def test_the_digest_of_parts_is_that_of_the_whole(parts: list[list[int]]) -> None:
    whole = np.array([token_id for part in parts for token_id in part], np.int32)
    assert codec.digest(*(np.array(part, np.int32) for part in parts)) == codec.digest(whole)


def test_the_laws_of_the_codec_are_asked_of_every_decoding_option() -> None:
    seen: dict[str, set[Any]] = {field.name: set() for field in dataclasses.fields(DecodingParams)}

    @law(100)
    @given(any_params)
    def collect(params: DecodingParams) -> None:
        for name, values in seen.items():
            values.add(getattr(params, name))

    collect()
    assert [name for name, values in seen.items() if len(values) < 2] == []
