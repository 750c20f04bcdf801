"""The target's side of a session on vLLM: tokens and parameters here, KV in vLLM."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from skydraft.cloud.seats import Served, SessionTarget
from skydraft.cloud.vllm.asking import Asking, params_text
from skydraft.cloud.vllm.lookup import look_up
from skydraft.decoding.verification import TargetText
from skydraft.engines.vocab import TokenIds
from skydraft.errors import ContextExceeded, EngineError, PromptError
from skydraft.protocol.values import Opening
from skydraft.types import Cost, DraftBlock, Reuse, Verdict


class Pending:
    """A block that vLLM judges; `answered` is its verdict, None until then."""

    def __init__(self, block: DraftBlock, catch_up: tuple[int, ...], seen: TokenIds, limit: int) -> None:
        self.block = block
        self.catch_up = catch_up
        self.seen_len = len(seen)
        # Tokens past the length limit can never be accepted, and may not fit into the context.
        draft = block.token_ids[: limit - block.base]
        self.token_ids: TokenIds = np.concatenate([seen, np.array([*catch_up, *draft], np.int32)])
        self.answered: Verdict | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows to judge."""
        return len(self.token_ids) - self.seen_len + 1

    def verdict(self, cost: Cost) -> Verdict:
        """The verdict, with what it cost. Raises EngineError before there is one."""
        if self.answered is None:
            raise EngineError("This block is not judged yet.")
        return replace(self.answered, cost=cost)


class VllmTarget(TargetText):
    """One session. A seat is a promise of KV memory; vLLM assigns the memory itself, request by request.

    Requests reuse KV only under the same `salt`: sessions of the same owner and scope share one.
    """

    def __init__(self, opening: Opening, served: Served, room: int) -> None:
        super().__init__(
            opening.prompt, opening.params, served.vocab, room, top=opening.top, committed=opening.committed_ids
        )
        self._params = opening.params
        self._chooser_name = uuid.uuid4().hex
        self.salt = uuid.uuid4().hex
        self.is_seated = False
        self.needs_prefill = False
        self.known_to = -1  # the start of the engine whose worker has its parameters

    @property
    def guess(self) -> tuple[int, ...]:
        """A guess of the next tokens from the text itself: one more row costs less than one more request."""
        return look_up(self.token_ids)

    def take_seat(self, salt: str | None = None) -> None:
        """Give the session a seat; a prefill must follow."""
        self.salt = salt or self.salt
        self.is_seated = self.needs_prefill = True

    def take_over(self, before: VllmTarget) -> None:
        """Continue with the seat and salt of an earlier epoch."""
        self.salt, self.is_seated, self.needs_prefill = before.salt, True, before.needs_prefill
        before.is_seated = False

    def keep_apart(self) -> None:
        """Share KV with no other session from now on."""
        self.salt = uuid.uuid4().hex

    def take_prefill_cost(self) -> Cost:
        """No cost: vLLM reports the cost of the prompt after reading it."""
        return Cost()

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Pending:
        """The block for vLLM to judge. Committed tokens do not change."""
        return Pending(block, tuple(catch_up), self.token_ids, self._stopping.max_new_tokens)

    def asking(self, work: Pending, *, with_params: bool) -> Asking:
        """The request fields that accompany the ids of a block."""
        return Asking(
            chooser=self._chooser_name,
            params=params_text(self._params) if with_params else "",
            prompt_len=len(self._prompt.token_ids),
            seen_len=work.seen_len,
            num_catch_up=len(work.catch_up),
            max_new_tokens=self._stopping.max_new_tokens,
            top=self._top,
        )

    def close(self, *, failed: bool = False) -> None:
        """Give the seat back; vLLM drops the KV when it needs the memory."""
        self.is_seated = self.needs_prefill = False


class VllmSeats:
    """Seats as promises of KV memory: the server limits their number, and vLLM manages the memory."""

    def __init__(self, served: Served) -> None:
        self.served = served

    def target(self, opening: Opening) -> VllmTarget:
        """The target's side of a new session. Raises PromptError, OptionError, GrammarRefused or LimitExceeded."""
        prompt, served = opening.prompt, self.served
        if prompt.media:
            raise PromptError(f"The model {served.name} takes no audio here: vLLM judges text alone.")
        if not prompt.token_ids:
            raise PromptError("The prompt is empty.", hint="Give at least one word.")
        if len(prompt.token_ids) >= served.context_len:
            raise ContextExceeded(
                f"The prompt has {len(prompt.token_ids)} tokens, the context of {served.name} holds "
                f"{served.context_len}.",
                hint="Shorten the prompt or raise --context.",
            )
        return VllmTarget(opening, served, served.context_len - len(prompt.token_ids))

    def seat(self, target: SessionTarget, opening: Opening, reuse: Reuse | None) -> None:
        """Give `target` a seat; it shares KV only with sessions of the same `reuse`."""
        own(target).take_seat(hashlib.sha256(reuse.scope.encode()).hexdigest() if reuse else None)

    def hand_over(self, before: SessionTarget, target: SessionTarget) -> None:
        """Move the seat of an earlier epoch of the same session to `target`."""
        own(target).take_over(own(before))

    def forget_kept(self, older_than_s: float) -> None:
        """Do nothing: vLLM evicts its cache itself."""


def own(target: SessionTarget) -> VllmTarget:
    """`target` as a VllmTarget."""
    assert isinstance(target, VllmTarget)  # `VllmSeats.target` makes no other kind
    return target
