"""One generation for its user: rounds, tokens, text and figures; and its observers."""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from skydraft.choosing.thinking import tagged_pieces, tags_of
from skydraft.decoding.accounts.receipt import Receipt, Sent, receipt_of
from skydraft.decoding.accounts.scoring import prompt_scores
from skydraft.decoding.accounts.stats import Stats, stats_of
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.request import GenerateRequest, Prepared
from skydraft.decoding.target import Target
from skydraft.engines.base import Engine
from skydraft.engines.vocab import Vocab
from skydraft.errors import SkydraftError
from skydraft.thinking import NO_TAGS, Tags, num_suspect
from skydraft.types import FinishReason, LinkCost, Origin, Round, Score, StepRecord, Token

log = logging.getLogger("skydraft.decoding")


class Observer(Protocol):
    """Watches generations. It may watch several at a time, each called in the thread that uses it."""

    def begins(self, request: GenerateRequest) -> bool:
        """Return whether the target will read the finished text later. Called before anything is computed."""

    def ended(self, generation: Generation) -> None:
        """Called once for each generation, when it is complete, failed, cancelled or closed."""


class Watch:
    """The observers of one generation. A failing observer cannot end it, and each sees its end once."""

    def __init__(self, observers: Iterable[Observer], request: GenerateRequest) -> None:
        self.is_audited = False  # whether an observer has the target read the finished text
        self._observers: list[Observer] = []
        for observer in observers:
            try:
                self.is_audited |= observer.begins(request) is True
                self._observers.append(observer)
            except Exception:
                log.exception("an observer failed")

    def end(self, generation: Generation) -> None:
        observers, self._observers = self._observers, []
        for observer in observers:
            try:
                observer.ended(generation)
            except Exception:
                log.exception("an observer failed")


class Generation(AbstractContextManager["Generation"]):
    """One generation. It computes while you iterate over it, or in `run`.

    An iteration gives tokens as they come. Another iteration repeats them from the first, then continues the
    generation. `text` and `token_ids` first run a generation that has not begun to its end; later they hold the state
    so far, as `stats`, `origins` and `records` always do. Its end, `close` or leaving its `with` block frees the
    sequences; the engines stay open.
    """

    def __init__(
        self, loop: SpeculativeLoop, request: Prepared, edge: Engine | None, target: Target | None, watch: Watch
    ) -> None:
        self.request, self.edge, self.target, self.is_audited = request, edge, target, watch.is_audited
        self._watch, self._loop, self._context = watch, loop, loop.context
        goes_on = request.begun_is_prompt or (bool(request.messages) and request.messages[-1].is_open)
        self._stream = TextStream(loop.vocab, request.params.stop, tags_of(request.params), goes_on=goes_on)
        self._rounds: list[Round] = []
        self._tokens: list[Token] = []
        self._rest = ("", "")  # (thinking, text) held back before an interrupt
        pushed = [(token_id, *self._stream.push(token_id)) for token_id in self._context.generated.tolist()]
        self._begun = [Token(token_id, "edge", text, -1, thought) for token_id, thought, text in pushed]
        self._has_begun = False
        self._error: Exception | None = None  # that ended it

    def rounds(self) -> Iterator[tuple[Round, list[Token]]]:
        """Yield rounds as they are committed, each with its tokens and only once over all iterations. An error ends the
        generation; later calls and `text` raise it again. Raises EngineError if it was closed before its end."""
        self._check()
        self._has_begun = True
        try:
            for done in self._loop.rounds():
                self._rounds.append(done)
                yield done, [self._show(done, index) for index in range(len(done.token_ids))]
        except GeneratorExit:
            raise  # this iterator is dropped; the generation may still go on
        except BaseException as error:
            was_closed = self._loop.is_closed  # by its user, who may still read the text so far
            self.close()
            if not (self._loop.is_cancelled and isinstance(error, SkydraftError)):  # a cancelled wait ends like this
                self._error = error if isinstance(error, Exception) and not was_closed else None
                raise
        self.close()

    def _check(self) -> None:
        if self._error:
            raise self._error.with_traceback(None)  # or the traceback grows with each call

    def scores(self, done: Round) -> tuple[Score, ...]:
        base = done.record.base
        return self._context.scores.between(base, base + len(done.token_ids)) if self._context.scores else ()

    @property
    def begins(self) -> str:
        """Text of the tokens fixed by the request as the answer's beginning. Not part of `text`."""
        return "".join(token.text for token in self._begun)

    def scores_of_both(self) -> tuple[tuple[Score | None, ...], tuple[Score | None, ...]]:
        """Return (the draft model's, the target's) scores so far, for each token."""
        scores, base = self._context.scores, self._context.base
        return scores.of_both(len(self._begun), base) if scores else ((), ())

    def prompt_scores(self) -> Iterator[Score]:
        """Yield scores of the prompt's tokens, if the request wants them, by the model that writes the text."""
        local = self.target.engine if self.target and self.request.plan.verifies else None
        engine, prompt = (local, self.request.prompts.target) if local else (self.edge, self.request.prompts.edge)
        num_best = self.request.num_best if self.request.scores_prompt else None
        if engine and num_best is not None and self._loop.seats.take(len(prompt.token_ids)):
            yield from prompt_scores(engine, prompt, num_best)

    def __iter__(self) -> Iterator[Token]:
        rounds, num_given = self.rounds(), 0
        while num_given < len(self._tokens) or next(rounds, None):
            # Another iteration may have committed rounds meanwhile.
            while num_given < len(self._tokens):
                num_given += 1
                yield self._tokens[num_given - 1]

    def _show(self, done: Round, index: int) -> Token:
        thought, text = self._stream.push(done.token_ids[index])
        if self._context.finish is not None and index + 1 == len(done.token_ids):
            last = self._stream.finish()
            thought, text = thought + last[0], text + last[1]
        self._tokens.append(Token(done.token_ids[index], done.origins[index], text, done.record.round, thought))
        return self._tokens[-1]

    def interrupt(self) -> str:
        """End after the committed tokens, with the `finish_reason` "interrupted". Returns the text held back."""
        self._has_begun = True
        if self._context.finish is not None:
            return ""
        self._context.interrupt()
        self._rest = self._stream.finish()
        return self._rest[1]

    def cancel(self) -> None:
        """End `rounds` after the current round, or during a prefill, without an error. Any thread may call this; all
        other methods belong to one thread."""
        self._loop.cancel()

    def run(self) -> Generation:
        """Generate to the end; returns this generation. Raises a SkydraftError."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the KV memory, and notify the observers."""
        self._has_begun = True
        try:
            self._loop.close()
        finally:
            self._watch.end(self)

    def __del__(self) -> None:
        # A dropped generation must free its sequences. This may run in any thread, even within an observer, so it calls
        # no observer.
        self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The text so far, without special tokens, thinking and a stop string. Runs a generation that has not begun."""
        self._settle()
        return "".join(token.text for token in self._tokens) + self._rest[1]

    def _settle(self) -> None:
        self._check()
        if not self._has_begun:
            self.run()

    @property
    def reasoning(self) -> str:
        """The thinking before the text, without tags. Runs a generation that has not begun."""
        self._settle()
        return "".join(token.reasoning for token in self._tokens) + self._rest[0]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far, an end token included. Runs a generation that has not begun."""
        self._settle()
        return tuple(token_id for done in self._rounds for token_id in done.token_ids)

    @property
    def origins(self) -> tuple[Origin, ...]:
        return tuple(origin for done in self._rounds for origin in done.origins)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._context.finish

    @property
    def stop_string(self) -> str:
        return self._stream.stopped_by

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._context.token_ids) - self._context.base + len(self._begun)

    @property
    def rounds_so_far(self) -> tuple[Round, ...]:
        return tuple(self._rounds)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        return tuple(done.record for done in self._rounds)

    @property
    def receipt(self) -> Receipt:
        """The parts of prompt and answer that servers have seen, fixed first tokens included."""
        verifier, prices = self._loop.verifier, self.target.prices if self.target else None
        sent, link = (verifier.sent, verifier.link) if verifier else (Sent(), LinkCost())
        tokens, cost = (*self._begun, *self._tokens), prices.of(link) if prices else None
        is_sent_later = self.is_audited and self.target is not None and self.target.engine is None
        return replace(receipt_of(sent, tokens, self._stream.pieces, link, cost), audited=is_sent_later)

    @property
    def stats(self) -> Stats:
        adapter = self.edge.adapter if self.edge and self.request.plan.drafts else None
        if self.target is None:
            return stats_of(self.records, adapter=adapter)
        is_exact = self.target.is_exact or (self.target.engine is not None and not self.request.plan.drafts)
        return stats_of(self.records, is_exact=is_exact, prices=self.target.prices, adapter=adapter)


class TextStream:
    """Turns tokens into text, one at a time.

    Text that may begin a stop string is held back until the next tokens decide. `stopped_by` is the first stop string
    in the answer, the shorter of two that begin together.
    """

    def __init__(self, vocab: Vocab, stop: Seq[str] = (), tags: Tags = NO_TAGS, *, goes_on: bool = False) -> None:
        self.pieces = tagged_pieces(vocab, tags)
        self._thought = replace(tags.begin, has_said=goes_on)  # a continued text keeps its first blanks
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")  # goes on after a wrong byte
        self._held = self.stopped_by = ""

    def push(self, token_id: int) -> tuple[str, str]:
        """Add a token; returns the (thinking, answer) text that is now certain."""
        thought, text = "", self._decoder.decode(self.pieces[token_id])
        if self._thought.phase != "answer":
            self._thought, thought, text = self._thought.then(text)
        return _shown(thought), _shown(self._push(text))

    def _push(self, text: str) -> str:
        self._held += text
        if self.stopped_by:
            return ""
        if found := [(at, len(text), text) for text in self._stop if (at := self._held.find(text)) >= 0]:
            start, _, self.stopped_by = min(found)
            return self._held[:start]
        return self._release(len(self._held) - max((num_suspect(self._held, each) for each in self._stop), default=0))

    def finish(self) -> tuple[str, str]:
        """End the text; returns the (thinking, answer) text held back, without an incomplete character."""
        thought, text = self._thought.rest
        text = self._push(text)
        return _shown(thought), _shown(text if self.stopped_by else text + self._release(len(self._held)))

    def _release(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        return text


def _shown(text: str) -> str:
    """Replace wrong bytes by U+FFFD."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
