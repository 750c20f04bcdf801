"""A cloud as the Python interface sees it: something that generations can be verified by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from skydraft.config import DecodingParams
from skydraft.decoding.context import Committed
from skydraft.decoding.plan import Plan
from skydraft.decoding.target import TargetCosts
from skydraft.edge.link import Link, LinkOptions
from skydraft.edge.outage import Notify
from skydraft.edge.verifier import Patience, RemoteVerifier
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudTimeout, OptionError, SkydraftError
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import Opening, ServerInfo
from skydraft.types import Prompt

T = TypeVar("T")
OnTargetChange = Literal["stop", "continue"]
_NUM_PINGS = 3
_PAUSE_S = 0.2
_QUICK_S = 0.5


def _silent(line: str) -> None:
    return None


class Cloud:
    """A server, and how to behave when it is slow or gone. For one generation at a time.

    `timeout_s` is how long an answer is waited for, be the cloud busy or gone. A gated plan goes on alone within a
    second of silence, unless `require`; a cloud that is more than half a second away counts as silent there.
    It has no `engine` here: the draft model's tokenizer is needed to ask it anything.
    `on_target_change` says whether a gated text goes on, with a notice, when the server comes back with another model,
    execution or a smaller context; a lossless text, and one of a calibrated gate, always stop there.
    `open_ahead` opens each session at once instead of at the first escalation. `works_ahead` has the draft model draft
    while a verdict is waited for; None has it so unless the server is on this machine, where both would share the
    processor. `notify` gets a line when the cloud goes and when it is back.
    """

    engine = None

    def __init__(
        self,
        link: LinkOptions,
        *,
        timeout_s: float = 30.0,
        require: bool = False,
        open_ahead: bool = False,
        work_ahead: bool | None = None,
        on_target_change: OnTargetChange = "continue",
        notify: Notify = _silent,
    ) -> None:
        if not 0 < timeout_s < 86400:
            raise OptionError(f"--cloud-timeout must be a number of seconds above 0, not {timeout_s:g}.")
        self.link = Link(link)
        self._timeout_s = timeout_s
        self._require = require
        self._open_ahead = open_ahead
        self.works_ahead = not self.link.is_here if work_ahead is None else work_ahead
        self._goes_on = on_target_change == "continue"
        self._notify = notify

    def info(self) -> ServerInfo:
        """What the server runs and how fast. Asked for until `timeout_s` is over. Raises CloudError."""
        return self._patiently(lambda: self.link.info(self._timeout_s))

    def _patiently(self, ask: Callable[[], T]) -> T:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return ask()
            except SkydraftError as error:
                if not error.retryable:
                    raise
                if time.monotonic() + _PAUSE_S > until:
                    raise CloudTimeout(
                        f"The cloud at {self.link.target} did not answer for {self._timeout_s:g} s: {error.message}",
                        hint=f"Run: skydraft doctor --cloud {self.link.target}. To wait longer: --cloud-timeout.",
                    ) from error
            time.sleep(_PAUSE_S)
            self.link.reconnect()

    def falls_back(self, plan: Plan) -> bool:
        """Whether a generation by this plan goes on alone when the cloud is gone."""
        return plan.is_gated and not self._require

    @staticmethod
    def _takes_any_target(plan: Plan) -> bool:
        return plan.is_gated and plan.gate.kind != "calibrated"

    def costs(self, *, quick: bool) -> TargetCosts:
        """What an adaptive k starts from: the server's forward times, and the round trip of a few pings."""
        info = self._info(quick=quick)
        ping = partial(self.link.ping, _QUICK_S) if quick else partial(self._patiently, self.link.ping)
        wire_ms = statistics.median(ping() for _ in range(_NUM_PINGS))
        return TargetCosts(info.forward_ms, info.max_rows, wire_ms=wire_ms, streams=True, max_block=info.max_block)

    def max_block(self, *, quick: bool) -> int:
        """The longest block that the server takes. Raises CloudError."""
        return self._info(quick=quick).max_block

    def weights(self, *, quick: bool) -> tuple[str, str]:
        """(name, fingerprint of the weights) of the server's model; asked for half a second where `quick`.

        Raises CloudError.
        """
        info = self._info(quick=quick)
        return info.model, info.weights

    def _info(self, *, quick: bool) -> ServerInfo:
        return self.link.info(min(_QUICK_S, self._timeout_s)) if quick else self.info()

    def verifier(
        self, context: Committed, prompt: Prompt, vocab: Vocab, plan: Plan, params: DecodingParams, cache_scope: str
    ) -> RemoteVerifier:
        """The verifier of one generation."""
        fingerprint = short_fingerprint(vocab.fingerprint)
        verifier = RemoteVerifier(
            self.link,
            context,
            Opening(fingerprint, prompt, params=params, top=plan.top, cache_scope=cache_scope),
            Patience(self._timeout_s, self.falls_back(plan), self._goes_on and self._takes_any_target(plan)),
            streams=not plan.drafts or plan.k is None,
            vocab_size=vocab.size,
            notify=self._notify,
        )
        if plan.drafts and (self._open_ahead or not plan.is_gated):
            verifier.open_ahead()
        return verifier

    def close(self) -> None:
        """Let go of the connection."""
        self.link.close()
