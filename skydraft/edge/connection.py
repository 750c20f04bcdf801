"""A cloud as the Python interface sees it: something that generations can be verified by."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

from skydraft.config import DecodingParams
from skydraft.decoding.context import Committed
from skydraft.decoding.plan import Plan
from skydraft.decoding.target import TargetCosts
from skydraft.edge.fleet import Fleet, Links, Notify
from skydraft.edge.link import Link
from skydraft.edge.patience import Patience
from skydraft.edge.verifier import RemoteVerifier, new_number
from skydraft.engines.vocab import Vocab
from skydraft.errors import CloudTimeout, OptionError, SkydraftError
from skydraft.protocol.codec import short_fingerprint
from skydraft.protocol.values import Opening, ServerInfo
from skydraft.types import Prompt

T = TypeVar("T")
OnTargetChange = Literal["stop", "continue"]
_NUM_PINGS = 2  # of which the shorter one counts
_COSTS_S = 120.0  # how long what a server said of its costs is good enough to begin with
_PAUSE_S = 0.2
_QUICK_S = 0.5
_ONE_OF_MANY_S = 3.0  # how long one of several servers may take to say what it runs


def _silent(line: str) -> None:
    return None


class Cloud:
    """One server or several that run the same, and how to behave when they are slow or gone. For one generation at a
    time; `beside` makes room for another one.

    `timeout_s` is how long an answer is waited for, be the cloud busy or gone. A gated plan goes on alone within a
    second of silence, unless `require`; a cloud that is more than half a second away counts as silent there.
    It has no `engine` here: the draft model's tokenizer is needed to ask it anything.
    `on_target_change` says whether a gated text goes on, with a notice, when the server comes back with another model,
    execution or a smaller context; a lossless text, and one of a calibrated gate, always stop there.
    `open_ahead` opens each session at once instead of at the first escalation. `works_ahead` has the draft model draft
    while a verdict is waited for; None does not. `notify` gets a line when the cloud
    goes and when it is back.
    """

    engine = None

    def __init__(
        self,
        fleet: Fleet,
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
        self._links = Links(fleet)
        self._number = new_number()  # of the next session, which decides where it goes
        self._timeout_s = timeout_s
        self._require = require
        self._open_ahead = open_ahead
        self.works_ahead = bool(work_ahead)
        self._on_target_change = on_target_change
        self._notify = notify
        self._costs: tuple[float, str, TargetCosts] | None = None  # when they were asked for, and of which server

    def beside(self, notify: Notify) -> Cloud:
        """The same cloud for one more generation at a time; what is known of its servers is shared."""
        return Cloud(
            self._links.fleet,
            timeout_s=self._timeout_s,
            require=self._require,
            open_ahead=self._open_ahead,
            work_ahead=self.works_ahead,
            on_target_change=self._on_target_change,
            notify=notify,
        )

    @property
    def link(self) -> Link:
        """The connection to the server that the next generation goes to."""
        return self._links.home(self._number)

    def info(self) -> ServerInfo:
        """What the server runs and how fast. Asked for until `timeout_s` is over. Raises CloudError."""
        timeout_s = min(self._timeout_s, _ONE_OF_MANY_S) if self._has_others else self._timeout_s
        return self._patiently(lambda link: link.info(timeout_s))

    def ping(self, timeout_s: float) -> float:
        """The round trip to a server that is well, in milliseconds. Raises CloudLost."""
        return self._anywhere(lambda link: link.ping(timeout_s), timeout_s)

    @property
    def _has_others(self) -> bool:
        return len(self._links.fleet.servers) > 1

    def _anywhere(self, ask: Callable[[Link], T], wait_s: float) -> T:
        """The answer of the server that the next generation goes to, or of the next one that is there."""
        while True:
            link = self._links.place(self._number, self.link, wait_s)
            try:
                return ask(link)
            except SkydraftError as error:
                if isinstance(error, CloudTimeout) and wait_s <= _QUICK_S:
                    raise  # a quick question, which the first connection to a server that is far away may outlast
                if not (self._links.fleet.lost(link.target, error) and self._links.fleet.has_other(link.target)):
                    raise

    def _patiently(self, ask: Callable[[Link], T]) -> T:
        until = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._anywhere(ask, self._timeout_s)
            except SkydraftError as error:
                if not error.retryable:
                    raise
                if time.monotonic() + _PAUSE_S > until:
                    name = self._links.name
                    raise CloudTimeout(
                        f"The cloud at {name} did not answer for {self._timeout_s:g} s: {error.message}",
                        hint=f"Run: skydraft doctor --cloud {name}. To wait longer: --cloud-timeout.",
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
        """What an adaptive k starts from: the server's forward times, and a round trip.

        Asked for now and then, since a generation learns from its own rounds, and asking takes three round trips before
        its first token. A server that is gone is not waited for: a generation does that, and can be cancelled.
        """
        now, name = time.monotonic(), self.link.target
        if self._costs is None or now - self._costs[0] > _COSTS_S or self._costs[1] != name:
            wait_s = _QUICK_S if quick else min(_ONE_OF_MANY_S, self._timeout_s)
            info = self._anywhere(lambda link: link.info(wait_s), wait_s)
            costs = TargetCosts(
                info.forward_ms, info.max_rows, wire_ms=min(self.ping(wait_s) for _ in range(_NUM_PINGS)),
                streams=True, max_block=info.max_block, model=info.model, weights=info.weights,
            )  # fmt: skip
            self._costs = now, name, costs
        return self._costs[2]

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
        quick_s = min(_QUICK_S, self._timeout_s)
        return self._anywhere(lambda link: link.info(quick_s), quick_s) if quick else self.info()

    def verifier(
        self, context: Committed, prompt: Prompt, vocab: Vocab, plan: Plan, params: DecodingParams, cache_scope: str,
        *, drafts_first: bool = True, traceparent: str = "",
    ) -> RemoteVerifier:  # fmt: skip
        """The verifier of one generation."""
        self._links.carry(traceparent)
        fingerprint = short_fingerprint(vocab.fingerprint)
        number, self._number = self._number, new_number()
        accepts_change = self._on_target_change == "continue" and self._takes_any_target(plan)
        verifier = RemoteVerifier(
            self._links,
            context,
            Opening(fingerprint, prompt, params=params, top=plan.top, cache_scope=cache_scope),
            Patience(self._timeout_s, self.falls_back(plan), accepts_change, self._has_others),
            streams=not plan.drafts or plan.k is None,
            vocab_size=vocab.size,
            number=number,
            notify=self._notify,
        )
        if plan.drafts and drafts_first and (self._open_ahead or not plan.is_gated):
            verifier.open_ahead()
        return verifier

    def close(self) -> None:
        """Let go of the connections."""
        self._links.close()
