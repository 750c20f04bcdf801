"""The target's side of a session on vLLM: tokens and parameters here, KV wherever vLLM keeps it."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from skydraft.cloud.judge import Served, SessionTarget
from skydraft.cloud.vllm.asking import Asking, params_text
from skydraft.cloud.vllm.lookup import look_up
from skydraft.decoding.verification import TargetText
from skydraft.engines.vocab import TokenIds
from skydraft.errors import ContextExceeded, EngineError, PromptError
from skydraft.protocol.values import Opening
from skydraft.types import Cost, DraftBlock, Reuse, Verdict


class Pending:
    """A block that vLLM is asked about; `found` is what it said, once it did."""

    def __init__(self, block: DraftBlock, catch_up: tuple[int, ...], seen: TokenIds, limit: int) -> None:
        self.block = block
        self.catch_up = catch_up
        self.seen_len = len(seen)
        # What lies past the length limit can never be accepted, and may not even fit into the context.
        draft = block.token_ids[: limit - block.base]
        self.token_ids: TokenIds = np.concatenate([seen, np.array([*catch_up, *draft], np.int32)])
        self.found: Verdict | None = None

    @property
    def num_rows(self) -> int:
        """How many rows have to be judged."""
        return len(self.token_ids) - self.seen_len + 1

    def verdict(self, cost: Cost) -> Verdict:
        """The verdict, with what it cost. Raises EngineError before there is one."""
        if self.found is None:
            raise EngineError("This block is not judged yet.")
        return replace(self.found, cost=cost)


class VllmTarget(TargetText):
    """One session. A seat is a promise of KV memory, which vLLM gives to whoever it has in hand.

    Its KV is read by nobody who does not know its `salt`: sessions of the same owner and scope share one.
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
        """What may come next by the text itself: a row more costs little beside a request of its own."""
        return look_up(self.token_ids)

    def take_seat(self, salt: str | None = None) -> None:
        """It may be judged from now on, after a prefill."""
        self.salt = salt or self.salt
        self.is_seated = self.needs_prefill = True

    def take_over(self, before: VllmTarget) -> None:
        """It goes on where an earlier epoch was."""
        self.salt, self.is_seated, self.needs_prefill = before.salt, True, before.needs_prefill
        before.is_seated = False

    def keep_apart(self) -> None:
        """Share KV with nobody any more."""
        self.salt = uuid.uuid4().hex

    def take_prefill_cost(self) -> Cost:
        """Nothing: what the prompt costs is known when vLLM has read it."""
        return Cost()

    def begin(self, block: DraftBlock, catch_up: Seq[int]) -> Pending:
        """What vLLM is to be asked about. Changes nothing that is committed."""
        return Pending(block, tuple(catch_up), self.token_ids, self._stopping.max_new_tokens)

    def asking(self, work: Pending, *, with_params: bool) -> Asking:
        """What goes with the ids of a block."""
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
        """Give the seat back; the KV is forgotten by vLLM when it needs the room."""
        self.is_seated = self.needs_prefill = False


class VllmSeats:
    """Promises of KV memory, as seats: how many there are is the server's limit, where it lies is vLLM's business."""

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
        """Give it a seat; its KV is shared with what `reuse` says, and with nobody else."""
        own(target).take_seat(hashlib.sha256(reuse.scope.encode()).hexdigest() if reuse else None)

    def hand_over(self, before: SessionTarget, target: SessionTarget) -> None:
        """Give it the seat of an earlier epoch of the same session."""
        own(target).take_over(own(before))

    def forget_kept(self, older_than_s: float) -> None:
        """vLLM forgets by itself."""


def own(target: SessionTarget) -> VllmTarget:
    """The same, as what it is here."""
    assert isinstance(target, VllmTarget)  # no others are made here
    return target
