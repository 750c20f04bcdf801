"""The verifier on the other end of a link. The edge's committed tokens are the truth; the server's are a copy.

Whatever is lost, a message, a session, a server, is asked for again or opened again from that truth, so that no token
is lost and none is doubled. Nothing but the number and the epoch of the session is remembered here.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np

from skydraft.decoding.context import Committed
from skydraft.edge.fleet import Links, Notify
from skydraft.edge.link import WATCH_S, SessionStream
from skydraft.edge.outage import Outage
from skydraft.edge.patience import FALLBACK_S, Patience
from skydraft.edge.token_stream import TokenStream
from skydraft.errors import (
    BaseMismatch,
    CloudBusy,
    CloudDraining,
    CloudError,
    CloudFailure,
    CloudLost,
    CloudTimeout,
    Diverged,
    LimitExceeded,
    NotAuthorized,
    ProtocolError,
    RateLimited,
    SessionNotFound,
    SessionTaken,
    SkydraftError,
    TargetChanged,
    TlsFailure,
    VocabularyMismatch,
)
from skydraft.protocol import codec
from skydraft.protocol.values import MAX_SESSION, Emission, Opened, Opening, SessionCall, VerifyCall
from skydraft.types import Cost, DraftBlock, LinkCost, Verdict

T = TypeVar("T")
_MAX_FAILURES = 3  # answers "internal error" in a row that are worth another try
_CLOSE_S = 1.0
_STREAM_S = 24 * 3600.0  # deadline of a stream, which is watched message by message; this only bounds a leak


class RemoteVerifier:
    """`Verifier` at one of several servers, for one generation whose committed tokens are `context`.

    The session, of this `number`, goes to the server that `links` chooses, and on at another one when that is lost.
    `opening` says how it begins, with no committed tokens yet; ids are below `vocab_size`. Where `streams`, a round
    without a draft is read from a Generate call: the target alone, without a round trip per token.
    """

    def __init__(
        self,
        links: Links,
        context: Committed,
        opening: Opening,
        patience: Patience,
        *,
        streams: bool = False,
        vocab_size: int = 2**31,
        number: int | None = None,
        notify: Notify = lambda line: None,
    ) -> None:
        self._links = links
        self._vocab_size = vocab_size
        self._context = context
        self._opening = opening
        self._prompt_ids = np.array(opening.prompt.token_ids, np.int32)
        self._patience = patience
        self._quick_s, self._ping_s = patience.quick_s, patience.ping_s
        self._streams = streams
        self._notify = notify
        self._outage = Outage(links, notify)
        self._rtt_ms = 0.0
        self._shared_bytes = 0
        self._number = number or new_number()
        self._link = links.home(self._number)
        self._is_placed = False  # whether the server there was well when it was last looked at
        self._epoch = 0
        self._is_open = False
        self._is_cancelled = False
        self._session: SessionStream | None = None
        self._ahead: Any = None  # an Open under way, as a call or in the session's stream
        self._stream: TokenStream | None = None
        self._emissions: Iterator[Emission] = iter(())
        self._link.take_bytes()  # what came before belongs to somebody else

    def verify(self, block: DraftBlock, catch_up: Seq[int]) -> Verdict:
        """The cloud's verdict. Raises CloudError when the cloud is gone for good, or, to fall back, for now."""
        if (gone := self._outage.error) is not None:
            raise gone.with_traceback(None)  # at once, as long as it is; or each round would stay in its traceback
        began = time.perf_counter()
        try:
            return self._ask_for_verdict(block, tuple(catch_up))
        finally:
            self._rtt_ms += (time.perf_counter() - began) * 1e3

    def _ask_for_verdict(self, block: DraftBlock, catch_up: tuple[int, ...]) -> Verdict:
        try:
            if self._streams and not block.token_ids and not catch_up:
                verdict = self._persist(lambda first: self._next_streamed(block))
            else:
                self._end_stream()
                verdict = self._persist(lambda first: self._judge(block, catch_up, quick=first))
        except CloudError as error:
            if self._patience.falls_back and error.is_outage:
                self._outage.begin(error)
            raise
        except LimitExceeded as error:
            # A text that has outgrown the cloud's context, say: the draft model may still have room.
            if not self._patience.falls_back:
                raise
            refused = CloudFailure(str(error))
            self._outage.begin(refused, final=True)
            raise refused from error
        if verdict.finish:
            self._is_open = False  # the server has given up the seat
        return verdict

    def spent(self) -> LinkCost:
        """Time waited for verdicts, and bytes of all messages, since this was last asked."""
        cost = LinkCost(self._rtt_ms, *self._link.take_bytes(), self._shared_bytes)
        self._rtt_ms, self._shared_bytes = 0.0, 0
        return cost

    def open_ahead(self) -> None:
        """Open the session now, so that the prompt is in the target's cache at the first verification."""
        with suppress(SkydraftError):  # no server, or the link was closed: the first verification will say so
            self._settle(most_s=FALLBACK_S)
            call = SessionCall(self._number, self._epoch, self._opening_to_send())
            if self._link.has_sessions:
                self._ahead = self._stream_of_session()
                self._ahead.send(codec.encode_streamed_open(call))
                return
            self._ahead = self._link.start("Open", codec.encode_session_call(call), self._patience.timeout_s)

    def _await_open(self) -> Opened | None:
        """Wait for an Open that was sent ahead, if one was. Raises what came of it."""
        ahead, self._ahead = self._ahead, None
        if self._session is not None and ahead is self._session:
            if (reply := self._session.receive(self._patience.timeout_s, self._ping_s)) is None:
                return None
            opened = self._read(codec.decode_streamed_opened, reply)
            self._learn(reply, "VerifyReply")
        elif ahead is not None:
            reply = self._link.wait(ahead, self._ping_s)
            opened = self._read(codec.decode_opened, reply)
            self._learn(reply, "OpenReply")
        else:
            return None
        self._is_open = True
        return opened

    def _stream_of_session(self) -> SessionStream:
        """The session's stream; a new one where it broke while nothing was asked. Raises CloudDraining."""
        if self._session is not None and self._session.is_over:
            is_draining = self._session.is_draining
            self._break_off()
            if is_draining:
                raise CloudDraining("it is shutting down.")
        if self._session is None:
            self._session = self._link.session()
        return self._session

    def _break_off(self) -> None:
        if self._session is not None:
            self._session.cancel()
            self._session = None

    def _opening_to_send(self) -> Opening:
        """The opening with all that the target has seen so far, about to be sent."""
        self._shared_bytes += codec.media_bytes(self._opening)
        seen = self._context.generated[: self._context.num_seen]
        return replace(self._opening, committed_ids=tuple(seen.tolist()))

    def _judge(self, block: DraftBlock, catch_up: tuple[int, ...], *, quick: bool) -> Verdict:
        opened = self._await_open()
        if not quick:
            self._link.ping(self._ping_s)  # before an opening is made: it is counted as sent
        opening = None if self._is_open else self._opening_to_send()
        checksum = codec.digest(self._prompt_ids, self._context.generated)
        call = VerifyCall(self._number, self._epoch, block.base, catch_up, block.token_ids, checksum, opening)
        reply = self._ask(call, quick=quick and opening is None)
        verdict = self._read(lambda data: codec.decode_verdict(data, len(catch_up)), reply)
        self._check(verdict, block)
        if opening is not None:
            self._learn(reply, "VerifyReply")
        self._is_open = True
        return replace(verdict, cost=opened.cost + verdict.cost) if opened else verdict

    def _ask(self, call: VerifyCall, *, quick: bool) -> bytes:
        """The answer to a request: in the session's stream, or to a call of its own where the server has none.

        An opening, which is not `quick`, takes long and is long: it is not sent twice to find that out.
        """
        timeout_s = self._patience.timeout_s
        if self._link.has_sessions:
            session = self._stream_of_session()
            session.send(codec.encode_verify_call(replace(call, session=0) if session.is_named else call))
            quick_s = self._quick_s if quick else WATCH_S
            if (reply := session.receive(timeout_s, self._ping_s, quick_s)) is not None:
                return reply
        request = codec.encode_verify_call(call)
        if quick:
            return self._link.call("Verify", request, self._quick_s)
        return self._link.call_watched("Verify", request, timeout_s, self._ping_s)

    def _learn(self, reply: bytes, kind: Literal["OpenReply", "VerifyReply", "GenerateReply"]) -> None:
        """Note what the text is begun with, so that nothing else goes on with it."""
        if self._opening.target is None:
            target = self._read(lambda data: codec.decode_target(data, kind), reply)
            self._opening = replace(self._opening, target=target)

    def _check(self, verdict: Verdict, block: DraftBlock) -> None:
        """Raise CloudFailure for what no verdict on this block can say: committed, it could not be undone."""
        end, most = block.base + verdict.num_tokens, self._opening.params.max_new_tokens
        if verdict.base != block.base or verdict.num_accepted > len(block.token_ids):
            says = "an answer to another request"
        elif verdict.token_id is not None and verdict.token_id >= self._vocab_size:
            says = f"the token {verdict.token_id}, which the vocabulary does not have"
        elif end > most or (end == most and verdict.finish is None):
            says = f"tokens beyond the {most} that were asked for"
        else:
            return
        raise CloudFailure(f"The cloud at {self._link.target} sent {says}.")

    def _read(self, decode: Callable[[bytes], T], reply: bytes) -> T:
        """What a reply says; one that says nothing is the server's failure, not wrong use."""
        try:
            return decode(reply)
        except ProtocolError as error:
            raise CloudFailure(f"The cloud at {self._link.target} sent an answer that cannot be read.") from error

    def _next_streamed(self, block: DraftBlock) -> Verdict:
        if self._stream is None:
            self._begin_epoch()
            call = SessionCall(self._number, self._epoch, self._opening_to_send())
            self._stream = TokenStream(self._link, codec.encode_session_call(call), _STREAM_S)
            self._emissions = self._one_by_one(self._stream)
        try:
            emission = next(self._emissions)
        except SkydraftError:
            self._end_stream()  # a generator that has raised has no more to give
            raise
        if emission.base != block.base:
            raise Diverged(f"The stream is at {emission.base}, the text at {block.base}.")
        verdict = Verdict(emission.base, 0, emission.token_ids[0], emission.finish, cost=emission.cost)
        self._check(verdict, block)
        return verdict

    def _one_by_one(self, stream: TokenStream) -> Iterator[Emission]:
        """The tokens of a stream, each as an emission of its own; what a message cost counts for its first token."""
        for message in stream.messages(self._patience.timeout_s, self._ping_s):
            emission = self._read(codec.decode_emission, message)
            self._learn(message, "GenerateReply")
            last = len(emission.token_ids) - 1
            for index, token_id in enumerate(emission.token_ids):
                cost = emission.cost if index == 0 else Cost()
                yield Emission(emission.base + index, (token_id,), emission.finish if index == last else None, cost)

    def _persist(self, ask: Callable[[bool], T]) -> T:
        """`ask` until it is answered, mending what can be mended. Its argument says whether it is the first try."""
        began = heard_at = time.monotonic()
        pause_s, num_failures, num_mended, first = 0.02, 0, 0, True
        while True:
            wait_s, is_silent = 0.0, True
            try:
                return ask(self._settle() or first)
            except (SessionNotFound, BaseMismatch, Diverged, SessionTaken) as error:
                last: SkydraftError = error
                is_silent = False
                wait_s = pause_s if num_mended else 0.0  # each try feeds the prompt again
                num_mended += 1
                self._mend(error)
            except (NotAuthorized, TlsFailure, TargetChanged, VocabularyMismatch) as error:
                last, is_silent = error, False
                self._overcome(error)
            except (CloudBusy, RateLimited) as error:
                last, is_silent = error, False
                wait_s = max(pause_s, error.retry_after_s if isinstance(error, RateLimited) else 0.0)
            except CloudTimeout as error:
                last = error  # slow, or dead: the next try is watched, and begins by asking
            except (CloudLost, CloudFailure) as error:
                num_failures += isinstance(error, CloudFailure)
                if num_failures >= _MAX_FAILURES:
                    raise
                self._mend(error)
                if isinstance(error, CloudLost) or num_failures > 1:
                    self._leave(error)
                last, wait_s = error, 0.0 if self._moves else pause_s
            if self._is_cancelled:
                raise CloudLost("The generation was cancelled.")
            first, pause_s = False, min(2 * pause_s, 1.0)
            now = time.monotonic()
            heard_at = max(heard_at, self._link.heard_at) if is_silent else now + wait_s
            silent_s = self._patience.silent_s + (self._patience.move_s if self._moves else 0.0)
            left_s = min(heard_at + silent_s, began + self._patience.timeout_s) - now
            if left_s < (1e-3 if is_silent and not self._patience.falls_back else wait_s):  # the last moment counts
                raise self._given_up(last, now - began)
            time.sleep(min(wait_s, left_s))

    @property
    def _moves(self) -> bool:
        """Whether the next try is at another server, which is there."""
        return not self._is_placed and self._links.fleet.has_other(self._link.target)

    def _leave(self, error: SkydraftError) -> bool:
        """Look for a server anew after what this one answered; whether there may be another one."""
        self._is_placed = False
        return self._links.fleet.lost(self._link.target, error)

    def _overcome(self, refusal: SkydraftError) -> None:
        """Go on elsewhere, or with another target, where that is allowed; raise the refusal otherwise."""
        is_begun = isinstance(refusal, VocabularyMismatch) or self._context.num_seen > 0
        is_about_target = is_begun and isinstance(refusal, TargetChanged | VocabularyMismatch)
        if (not is_about_target or self._links.fleet.is_asked_for(self._opening)) and self._leave(refusal):
            return
        if not (isinstance(refusal, TargetChanged) and self._patience.accepts_change):
            raise refusal
        self._notify(f"{refusal.message} Going on with it.")
        self._opening = replace(self._opening, target=None)
        self._mend(refusal)

    def _settle(self, *, most_s: float = math.inf) -> bool:
        """Be at a server that is well; whether that is another one than before. Raises what `Links.place` raises."""
        if self._is_placed:
            return False
        link = self._links.place(self._number, self._link, min(most_s, self._patience.silent_s))
        if not self._context.num_seen and (target := self._links.fleet.target):
            self._opening = replace(self._opening, target=target)
        self._is_placed = True
        if link is self._link:
            return False
        self._break_off()
        self._link = link
        self._begin_epoch()
        link.ping(self._patience.move_s)
        return True

    def _mend(self, error: SkydraftError) -> None:
        """Prepare another try after a failure: another connection, another epoch, another number."""
        self._end_stream()
        self._break_off()
        if isinstance(error, CloudLost):
            self._link.reconnect()
            return
        if isinstance(error, Diverged):
            self._notify(f"{error} Opening the session again with this device's tokens.")
        if isinstance(error, SessionTaken):
            self._number = new_number()
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._is_open = False
        self._ahead = None

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    def _given_up(self, last: SkydraftError, waited_s: float) -> CloudError:
        if self._patience.falls_back:
            return last if isinstance(last, CloudError) else CloudLost(str(last))
        return CloudTimeout(
            f"The cloud at {self._links.name} did not answer for {waited_s:.1f} s: {last.message}",
            hint=f"Run: skydraft doctor --cloud {self._links.name}. To wait longer: --cloud-timeout.",
        )

    def cancel(self) -> None:
        """Ask no more for what is not answered. From any thread."""
        self._is_cancelled = True

    def close(self) -> None:
        """End the session on the server, if it can be told."""
        self._outage.close()
        self._end_stream()
        session, self._session = self._session, None
        is_told = session is not None and session.close()
        if not is_told and (self._is_open or self._ahead is not None):
            self._link.start("Close", codec.encode_close(self._number), _CLOSE_S)
        self._is_open, self._ahead = False, None


def new_number() -> int:
    """The number of a session, which no other is likely to have."""
    return random.SystemRandom().randint(1, MAX_SESSION)
