"""The target accepts the drafted tokens that it would have written itself, and adds one. Only the prefix decides."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from skydraft.choosing.chooser import Chooser
from skydraft.choosing.stopping import Stopping
from skydraft.config import DecodingParams
from skydraft.decoding.accounts.receipt import Sent
from skydraft.decoding.accounts.scoring import score
from skydraft.decoding.context import Text
from skydraft.decoding.race.branch import Came
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.errors import BaseMismatch, EngineError, LimitExceeded
from skydraft.types import Cost, Draft, DraftBlock, FinishReason, LinkCost, Prompt, Score, Verdict


class Verifier(Protocol):
    """The interface between the loop on the edge and the target. `sent` lists the parts of the text that left this
    device, and `link` their total cost."""

    called: bool  # whether the last `verify` called the target; False if it took a token written before
    sent: Sent

    def verify(self, block: DraftBlock, catch_up: Seq[int], write: int = 0) -> Verdict:
        """Judge `block`, which follows the judged tokens and `catch_up`. The target's side commits the verdict.

        After a correction or an empty block the target may write `write` more tokens. They become the verdicts on the
        next empty blocks.
        """

    def hear(self, came: Came) -> None:
        """Call `came`, in any thread, with the target's new tokens."""

    def draft(self, draft: Draft) -> None:
        """Send drafts while the target writes. Any thread may call this."""

    def stop(self) -> bool:
        """Stop the target's writing. Returns False while empty blocks must still take written tokens."""

    def take_cost(self) -> LinkCost:
        """Return the cost of the link since the last call of this method."""

    @property
    def link(self) -> LinkCost: ...

    def cancel(self) -> None:
        """End a long wait; `verify` may raise then. Any thread may call this."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """How a text is judged. With `num_best` the tokens are scored."""

    prompt_len: int
    chooser: Chooser
    stopping: Stopping
    num_best: int | None = None


class Verification:
    """Judges one block, which follows `seen` and `catch_up`, a few rows at a time, up to the first difference.

    A caller may put the rows of several verifications into one forward. The rows come from `sequence`. Without one,
    they begin with the choice after `seen`.
    """

    def __init__(
        self, rules: Rules, seen: TokenIds, block: DraftBlock, catch_up: Seq[int] = (), sequence: Sequence | None = None
    ) -> None:
        self.block, self.catch_up = block, tuple(catch_up)
        self._rules, self._sequence = rules, sequence
        # Tokens past the length limit can never be accepted, and may not fit into the context.
        draft = block.token_ids[: rules.stopping.max_new_tokens - block.base]
        self._extended: TokenIds = np.concatenate([seen, np.array([*catch_up, *draft], np.int32)])
        self._seen_len = len(seen)
        self._fed_len = len(seen) - 1
        if sequence is not None:
            sequence.align(seen)  # not further: every catch-up token needs a row for its audit
            self._fed_len = sequence.length
        self._num_accepted, self._done = 0, False
        self._token_id: int | None = None
        self._finish: FinishReason | None = None
        self._audit: list[bool] = []
        self._scores: list[Score] = []

    @property
    def sequence(self) -> Sequence:
        assert self._sequence is not None
        return self._sequence

    def next_feed(self, max_rows: int) -> TokenIds | None:
        """Return the next tokens to feed, at most `max_rows`; None when the verdict is known."""
        return None if self._done else self._extended[self._fed_len : self._fed_len + max_rows]

    def absorb(self, rows: Rows) -> None:
        """Judge with the logits [len(feed), vocab] of the tokens from `next_feed`. Raises EngineError if logits
        in a needed row are not numbers."""
        first, self._fed_len = self._fed_len + 1, self._fed_len + len(rows)
        for length, row in enumerate(rows, first):
            if length >= self._seen_len and not self._done:
                self._judge(row, length)

    def _judge(self, row: Rows, length: int) -> None:
        prefix, rules = self._extended[:length], self._rules
        choice = rules.chooser.choose(row, prefix)
        drafted = int(self._extended[length]) if length < len(self._extended) else None
        if drafted is not None and length - rules.prompt_len < self.block.base:
            self._audit.append(choice == drafted)
            self._score(row, drafted)
            return
        if choice == drafted:
            self._num_accepted += 1
            text = self._extended[: length + 1]
        else:
            self._token_id = choice
            text = np.append(prefix, np.int32(choice))
        self._score(row, int(text[-1]))
        self._finish = rules.stopping.finish(text[rules.prompt_len :])
        self._done = self._token_id is not None or self._finish is not None

    def _score(self, row: Rows, token_id: int) -> None:
        if self._rules.num_best is not None:
            self._scores.append(score(row, token_id, self._rules.num_best))

    def verdict(self, cost: Cost) -> Verdict:
        audit, scores = tuple(self._audit), tuple(self._scores)
        return Verdict(self.block.base, self._num_accepted, self._token_id, self._finish, audit, cost, scores)


class TargetSession(Text):
    """The target's side of one generation: prompt, committed tokens, end, and a sequence of the engine.

    It owns its sequence from `adopt` to `release`; `prefill` feeds the prompt in parts. `committed` are generated
    tokens that are final already. `num_best` is as in `Rules`; `scores` cover all later tokens. `finish` says why the
    generation ended, None before its end. Raises PromptError for a prompt that does not fit, and LimitExceeded if
    `committed` fills the text.
    """

    def __init__(
        self, engine: Engine, prompt: Prompt, params: DecodingParams, *,
        committed: Seq[int] = (), num_best: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(prompt.token_ids, committed)
        self._engine, self._prompt = engine, prompt
        room, chooser = engine.room(prompt.token_ids, prompt.media), Chooser(params, engine.vocab, self._prompt_len)
        stopping = Stopping(params, engine.vocab, min(params.max_new_tokens, room))
        self._rules = Rules(self._prompt_len, chooser, stopping, num_best)
        self.scores: list[Score] = []
        self.finish: FinishReason | None = None
        if self.base >= self._rules.stopping.max_new_tokens:
            raise LimitExceeded(f"A generation of {self.base} tokens has reached its end.")
        self._sequence: Sequence | None = None

    @property
    def is_seated(self) -> bool:
        return self._sequence is not None

    @property
    def needs_prefill(self) -> bool:
        """Whether a part of the prompt is missing in the KV cache; False without a sequence."""
        return self._sequence is not None and self._sequence.length < self._prompt_len - 1

    @property
    def num_in_cache(self) -> int:
        return self._sequence.length if self._sequence else 0

    def adopt(self, sequence: Sequence) -> None:
        """Take ownership of a sequence: an empty one, or one from a session with the same prompt."""
        assert self._sequence is None
        self._sequence = sequence

    def release(self) -> Sequence:
        """Return the sequence, which the caller must close or adopt."""
        sequence, self._sequence = self._own(), None
        return sequence

    def _own(self) -> Sequence:
        if self._sequence is None:
            raise EngineError("This session has no sequence.")
        return self._sequence

    def prefill(self) -> Cost:
        self._engine.prefill(self._own(), self._prompt.token_ids)
        return self.take_prefill_cost()

    def take_prefill_cost(self) -> Cost:
        """Return the cost of the prompt since the last call of this method or of `prefill`."""
        return self._sequence.take_prefill_cost() if self._sequence else Cost()

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Verification:
        """Return the verification of a block that passed `check`. Committed tokens do not change."""
        return Verification(self._rules, self.token_ids, block, catch_up, self._own())

    def check(self, block: DraftBlock, catch_up: Seq[int]) -> None:
        """Raise BaseMismatch unless the block follows the text and `catch_up`; LimitExceeded after the end."""
        if block.base != self.base + len(catch_up):
            raise BaseMismatch(f"A block follows {block.base - len(catch_up)} tokens, but the text has {self.base}.")
        if self.finish or block.base >= self._rules.stopping.max_new_tokens:
            raise LimitExceeded(f"This generation has ended, at {self.base} tokens.")

    def commit(self, done: Verification, cost: Cost) -> Verdict:
        """Commit the judged block and return its verdict. Raises BaseMismatch and changes nothing if other tokens were
        committed meanwhile."""
        self.check(done.block, done.catch_up)
        verdict = done.verdict(cost)
        self._add((*done.catch_up, *verdict.commits(done.block)))
        self.scores += verdict.scores
        self.finish = verdict.finish
        return verdict

    def close(self, *, failed: bool = False) -> None:
        """Free the sequence. The KV of a `failed` sequence may be wrong, so it is not reused."""
        sequence, self._sequence = self._sequence, None  # at once: another thread may be closing it too
        if sequence is not None:
            sequence.discard() if failed else sequence.close()
