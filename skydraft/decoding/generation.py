"""One generation as it is read: rounds, tokens, text as it comes, and figures."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from collections.abc import Sequence as Seq

from skydraft.decoding.context import Context
from skydraft.decoding.loop import SpeculativeLoop
from skydraft.decoding.request import GenerateRequest
from skydraft.decoding.stats import Stats, stats_of
from skydraft.engines.vocab import Vocab
from skydraft.prompts.pair import PromptPair
from skydraft.types import FinishReason, Origin, Round, StepRecord, Token


class Generation:
    """One generation under way. Nothing is computed before it is iterated over, or `run`.

    Iterating gives tokens as they come; doing so again gives the same tokens from the first one on, and then goes on
    where the generation is not at its end. `text`, `token_ids`, `stats` and the like tell how far it is: before the
    first round they are empty, after `run`, or when an iteration has ended, they are final. Its end, `close` or leaving
    its `with` block frees the sequences; the engines stay open for the next one.
    """

    def __init__(
        self, loop: SpeculativeLoop, context: Context, stream: TextStream, prompts: PromptPair, request: GenerateRequest
    ) -> None:
        self.request = request
        self.prompts = prompts
        self._loop = loop
        self._context = context
        self._stream = stream
        self._rounds: list[Round] = []
        self._tokens: list[Token] = []
        self._texts: list[str] = []

    def rounds(self) -> Iterator[tuple[Round, list[Token]]]:
        """Rounds as they are committed, each with its tokens. Only those still to come: no round is given twice."""
        for done in self._loop.rounds():
            self._rounds.append(done)
            yield done, [self._show(done, index) for index in range(len(done.token_ids))]
        self.close()

    def __iter__(self) -> Iterator[Token]:
        rounds, num_given = self.rounds(), 0
        while num_given < len(self._tokens) or next(rounds, None):
            # Whoever else iterates may have gone on meanwhile, so that there are more than this round's.
            while num_given < len(self._tokens):
                num_given += 1
                yield self._tokens[num_given - 1]

    def _show(self, done: Round, index: int) -> Token:
        text = self._stream.push(done.token_ids[index])
        is_last = self._context.finish is not None and index + 1 == len(done.token_ids)
        text += self._stream.finish() if is_last else ""
        self._texts.append(text)
        self._tokens.append(Token(done.token_ids[index], done.origins[index], text, done.record.round))
        return self._tokens[-1]

    def interrupt(self) -> str:
        """End after what is committed so far; `finish_reason` becomes "interrupted". Returns the text held back."""
        if self._context.finish is not None:
            return ""
        self._context.interrupt()
        self._texts.append(self._stream.finish())
        return self._texts[-1]

    def cancel(self) -> None:
        """Let `rounds` end after the round in hand, or while a prompt is being read; it may raise a SkydraftError then.

        From any thread; nothing else of a generation may be used by two.
        """
        self._loop.cancel()

    def run(self) -> Generation:
        """Generate to the end; returns this generation. Raises a SkydraftError."""
        for _ in self:
            pass
        return self

    def close(self) -> None:
        """Free the KV memory of this generation."""
        self._loop.close()

    def __del__(self) -> None:
        # One that is dropped half-way must not keep its seat in the engine.
        self.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def text(self) -> str:
        """The text so far, without special tokens and without a stop string; "" before the first round."""
        return "".join(self._texts)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens generated so far, an end token included."""
        return tuple(token_id for done in self._rounds for token_id in done.token_ids)

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each token generated so far came from."""
        return tuple(origin for done in self._rounds for origin in done.origins)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ended; None while it goes on."""
        return self._context.finish

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt, chat template included."""
        return len(self._context.token_ids) - self._context.base

    @property
    def rounds_so_far(self) -> tuple[Round, ...]:
        """The rounds that are committed."""
        return tuple(self._rounds)

    @property
    def records(self) -> tuple[StepRecord, ...]:
        """One record per round so far."""
        return tuple(done.record for done in self._rounds)

    @property
    def started(self) -> float:
        """When its first round began, by `time.perf_counter`; before that, when it was made."""
        return self._loop.started

    @property
    def stats(self) -> Stats:
        """Figures over the rounds so far."""
        return stats_of(self.records)


class TextStream:
    """Turns tokens into text, one at a time.

    A character appears with the token that completes it. Text that may be the beginning of a stop string is held
    until it is known not to be; text from a stop string on is never shown.
    """

    def __init__(self, vocab: Vocab, stop: Seq[str] = ()) -> None:
        self._pieces = vocab.pieces
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; may be empty."""
        self._held += self._decoder.decode(self._pieces[token_id])
        if self._stopped:
            return ""
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        if found:
            self._stopped = True
            return self._held[: min(found)]
        return self._release(len(self._held) - self._num_suspect())

    def finish(self) -> str:
        """What is left at the end: held text, without an unfinished character."""
        return "" if self._stopped else self._release(len(self._held))

    def _release(self, num_chars: int) -> str:
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        return text

    def _num_suspect(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(text) - 1 for text in self._stop), default=0)
        for num_chars in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-num_chars:]) for text in self._stop):
                return num_chars
        return 0
