from collections.abc import Sequence as Seq

from skydraft.decoding.accounts.scoring import Scores
from skydraft.engines.base import TokenBuffer
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BaseMismatch
from skydraft.types import DraftBlock, FinishReason, Prompt, Verdict


class Text(TokenBuffer):
    """A prompt and `base` generated tokens after it: `token_ids` [prompt length + base]."""

    def __init__(self, prompt: Seq[int], generated: Seq[int] = ()) -> None:
        super().__init__((*prompt, *generated))
        self._prompt_len = len(prompt)

    @property
    def base(self) -> int:
        return self.length - self._prompt_len

    @property
    def generated(self) -> TokenIds:
        """[base]"""
        return self.token_ids[self._prompt_len :]


class Context(Text):
    """The committed tokens of one generation. It grows only at its end; other commits raise BaseMismatch.

    The target knows `num_seen` generated tokens: all up to its last verdict. `finish` says why the text ended, None
    before its end; if given, the text ends at once. `scores` are for its tokens, if wanted. The tokens `begun` are
    committed already; the target does not judge them.
    """

    def __init__(
        self, prompt: Prompt, *, scores: Scores | None = None, finish: FinishReason | None = None,
        begun: Seq[int] = (),
    ) -> None:  # fmt: skip
        super().__init__(prompt.token_ids, begun)
        self.scores, self.finish, self.num_seen = scores, finish, len(begun)

    @property
    def catch_up(self) -> tuple[int, ...]:
        return tuple(self.generated[self.num_seen :].tolist())

    def commit_skip(self, block: DraftBlock, finish: FinishReason | None) -> tuple[int, ...]:
        return self._commit(block.base, block.token_ids, finish)

    def commit_verdict(self, block: DraftBlock, verdict: Verdict) -> tuple[int, ...]:
        if verdict.base != block.base:
            raise BaseMismatch(f"A verdict on a block at {verdict.base} answers one at {block.base}.")
        committed = self._commit(block.base, verdict.commits(block), verdict.finish)
        if self.scores:
            self.scores.judged(block.base - len(verdict.audit), verdict.scores)
        self.num_seen = self.base
        return committed

    def interrupt(self) -> None:
        self.finish = self.finish or "interrupted"

    def _commit(self, base: int, token_ids: tuple[int, ...], finish: FinishReason | None) -> tuple[int, ...]:
        if base != self.base:
            raise BaseMismatch(f"A block or verdict follows {base} tokens, but the text has {self.base}.")
        self._add(token_ids)
        if self.scores:
            self.scores.settle(base, token_ids)
        self.finish = finish or self.finish  # an interrupt during the round stays
        return token_ids
