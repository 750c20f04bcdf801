"""Sessions as streams, from the server's side: what a client may send there, and which streams the server ends."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from skydraft import DecodingParams
from skydraft.errors import BaseMismatch, ProtocolError, RateLimited
from skydraft.protocol import codec
from skydraft.types import Draft

from ..serving import RawSession, Serving, free_port, serving
from .driver import later, long_text, slow_toy, text, tokens_written, verdict_of, verify_message

New = Callable[[], RawSession]
LONG_TEXT = text(DecodingParams(max_new_tokens=150, min_new_tokens=150))
STOP = codec.encode_stop(0)


@pytest.fixture
def slow() -> Iterator[tuple[Serving, RawSession]]:
    """A server that writes 500 tokens a second, counts, and whom anyone may ask, and a stream to it."""
    with serving(slow_toy(), metrics_port=free_port()) as server, grpc.insecure_channel(server.address) as channel:
        yield server, RawSession(channel)


def test_a_stop_ends_the_writing_and_the_session_stays_for_the_next_block(slow: Any) -> None:
    _, stream = slow
    verdict = verdict_of(stream.ask(long_text()))
    stream.send(codec.encode_stop(9))  # of another verify
    first, _, _ = codec.decode_verdict(stream.answer(), is_first=False)
    stream.send(STOP)
    written = (verdict.token_id, *first.commits(), *tokens_written(stream))
    assert written == LONG_TEXT[: len(written)]
    stream.send(STOP)  # after the end, so that it means nothing
    verdict = verdict_of(stream.ask(later(*written, draft=LONG_TEXT[len(written) : len(written) + 3])))
    assert (verdict.base, verdict.num_accepted) == (len(written), 3)
    assert verdict.cost.prefill_ms == 0 and verdict.cost.num_rows == 4


@pytest.mark.parametrize("closes", [False, True])
def test_what_is_sent_while_the_target_writes_ends_that_and_waits_for_its_turn(slow: Any, closes: bool) -> None:
    server, stream = slow
    verdict = verdict_of(stream.ask(long_text()))
    stream.send(*[codec.encode_close(0)] if closes else [later(base=7, digest=1), STOP])
    written = (verdict.token_id, *tokens_written(stream))
    assert written == LONG_TEXT[: len(written)]
    if closes:
        assert not list(stream.call) and stream.call.code() is grpc.StatusCode.OK
        server.wait_until(lambda: server.num_sessions == 0)
        return
    with pytest.raises(BaseMismatch, match=f"follows 7 tokens, but the text has {len(written)}"):
        stream.answer()


@pytest.mark.parametrize("how", ["cancelled", "cut"])
def test_a_client_that_breaks_off_while_the_target_writes_ends_that_and_keeps_its_session(slow: Any, how: str) -> None:
    server, _ = slow
    channel = grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)])
    stream = RawSession(channel)
    stream.ask(long_text())
    stream.answer()
    stream.end() if how == "cancelled" else channel.close()
    server.wait_until(lambda: server.metric("requests_waiting") == 0)
    num_written = server.metric('generated_tokens_total{model="toy"}')
    assert 1 < num_written < 1000 and server.num_sessions == 1
    with grpc.insecure_channel(server.address) as other:
        again = RawSession(other)
        assert verdict_of(again.ask(later(session=7, draft=(), write=3))).token_id == LONG_TEXT[0]  # the same block
        token_ids = (LONG_TEXT[0], *tokens_written(again))
        assert len(token_ids) >= min(num_written, 4) and token_ids == LONG_TEXT[: len(token_ids)]  # it asks for 1 + 3
    stream.end()
    channel.close()


def test_a_stream_is_about_one_session(new: New) -> None:
    stream = new()
    for _ in range(2):
        assert verdict_of(stream.ask(verify_message(7))).base == 0  # its own number may be named again
    with pytest.raises(ProtocolError, match="about session 7"):
        stream.ask(verify_message(8))
    assert verdict_of(new().ask(verify_message(8))).base == 0


@pytest.mark.parametrize("drafts", [[Draft(1, 0, (3,))] * 150, [Draft(0, 0, (3,) * 9000)]], ids=["messages", "tokens"])
def test_a_flood_of_drafts_ends_its_stream_and_no_session(new: New, drafts: list[Draft]) -> None:
    stream = new()
    verdict = verdict_of(stream.ask(verify_message(7)))
    stream.send(*map(codec.encode_draft, drafts))
    with pytest.raises(RateLimited, match="more drafts than the text can use"):
        stream.answer()
    assert verdict_of(new().ask(verify_message(7))) == verdict
