"""The pair behind the gateway: who drafts, who verifies, and which models a client can name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, TypeAlias

from skydraft import api
from skydraft.config import MODES
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.connection import Cloud
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, ServersDiffer
from skydraft.gateway.refusals import Refusal, unknown_model

PREFIX = "skydraft"
_LOOK_AGAIN_S = 2.0  # how long what was seen of a cloud is believed
CloudState: TypeAlias = Literal["up", "down", "local", "none"]
Notify: TypeAlias = Callable[[str], None]
Connect: TypeAlias = Callable[[Notify], Cloud]
Start: TypeAlias = Callable[..., AbstractContextManager[Generation]]  # as `skydraft.start`


class Pair:
    """A draft model, and a target in this process, or elsewhere, reached by `connect`, or none.

    A connection serves one generation at a time; used ones are kept for the next. `start` begins a generation.
    """

    def __init__(
        self, edge: Engine, target: Engine | None = None, *, connect: Connect | None = None,
        calibrated: bool | None = None, start: Start = api.start,
    ) -> None:  # fmt: skip
        self.edge = edge
        self._start = start
        self._target = target
        self._connect = connect
        self._idle: list[tuple[Cloud, _News]] = []
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._seen: tuple[float, CloudState] = (float("-inf"), "down")
        self._is_calibrated = calibrated

    @property
    def modes(self) -> list[str]:
        """Modes that a client can choose; `auto` unless the pair is known to have no calibration."""
        modes = [mode for mode in MODES if mode == "edge" or self._target or self._connect]
        return [mode for mode in modes if mode != "auto" or self._is_calibrated is not False]

    @property
    def names(self) -> list[str]:
        """Names of models."""
        return [PREFIX, *(f"{PREFIX}-{mode}" for mode in self.modes)]

    @property
    def cloud_name(self) -> str | None:
        """What the target is called, as far as it is known without asking."""
        return self._target.name if self._target else "cloud" if self._connect else None

    def mode_of(self, model: str) -> str:
        """The mode that a model's name stands for. Raises Refusal."""
        if model == PREFIX:
            return self.default_mode
        mode = model.removeprefix(f"{PREFIX}-")
        if f"{PREFIX}-{mode}" != model or mode not in self.modes:
            raise unknown_model(model, self.names)
        return mode

    @property
    def default_mode(self) -> str:
        """`auto` where the pair is calibrated, else `quality`; `edge` without a target."""
        if not (self._target or self._connect):
            return "edge"
        self.look()
        return "auto" if self._is_calibrated else "quality"

    @property
    def was_looked_at(self) -> bool:
        """Whether the default mode is known without asking the cloud."""
        return self._is_calibrated is not None or not (self._target or self._connect)

    def look(self) -> None:
        """Find out whether the pair is calibrated, if that is not known yet. May ask the cloud."""
        if self._is_calibrated is None and (self._target or self._connect):
            self._is_calibrated = self._find_calibration()

    def _find_calibration(self) -> bool | None:
        """Whether there is one; None while the cloud cannot be asked what it runs. Raises ServersDiffer."""
        try:
            with self._side() as (target, _):
                return api.is_calibrated(self.edge, target)
        except ServersDiffer:
            raise
        except CloudError:
            return None

    @contextmanager
    def _side(self) -> Iterator[tuple[Any, _News]]:
        """The target as a generation takes it, and news of it."""
        if self._connect is None:
            yield self._target, _News()
            return
        with self._lock:
            entry = self._idle.pop() if self._idle else None
        if entry is None:
            news = _News()
            entry = self._connect(news.append), news
        entry[1].clear()
        try:
            yield entry
        finally:
            with self._lock:
                self._idle.append(entry)

    @contextmanager
    def start(self, request: GenerateRequest) -> Iterator[tuple[Generation, _News]]:
        """A generation, which ends with the block, and news of the cloud during it."""
        with self._side() as (target, news), self._start(request, edge=self.edge, cloud=target) as generation:
            yield generation, news

    def cloud_state(self) -> CloudState:
        """Whether the cloud answers; looked at every other second. Blocks for half a second at most."""
        if self._connect is None:
            return "local" if self._target else "none"
        seen_at, state = self._seen
        if time.monotonic() - seen_at > _LOOK_AGAIN_S and self._looking.acquire(blocking=False):
            try:
                with self._side() as (cloud, _):
                    cloud.ping(0.5)
                state = "up"
            except CloudError:
                state = "down"
            finally:
                self._seen = time.monotonic(), state
                self._looking.release()
        return state

    def close(self) -> None:
        """Let go of connections; the engines are whose who opened them."""
        for cloud, _ in self._idle:
            cloud.close()
        self._idle.clear()


class _News(list[str]):
    """Lines about the cloud, in the order in which they came."""

    def take(self) -> str:
        """All lines so far, once."""
        lines, self[:] = " ".join(self), []
        return lines


def plan_of(mode: str, choice: Any, pair: Pair) -> Plan:
    """The plan of a model's mode, changed by what the client's extension asks for. Raises OptionError or Refusal."""
    mode = choice.mode or mode
    if mode not in pair.modes:
        raise Refusal(400, f"There is no mode '{mode}' here.", param="skydraft.mode")
    k = None if choice.k is None else str(choice.k)
    return make_plan(mode, choice.gate, k=k, accept=choice.accept or "exact", eager=choice.eager)
