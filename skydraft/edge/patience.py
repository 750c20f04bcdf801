"""How long the edge waits for the cloud before it asks again, goes elsewhere, goes on alone or gives up."""

from __future__ import annotations

from dataclasses import dataclass

from skydraft.edge.link import PING_S

FALLBACK_S = 0.65  # silence after which a gated run goes on alone; with a last try under way it stays below 1 s
_QUICK_S, _QUICK_WAITING_S = 0.3, 2.0  # a verdict usually comes within this; later the server is watched
_PING_S, _OTHERS_PING_S = 0.5, 2.0
_MOVE_S = 0.19  # with a quick try and a health check before, 0.99


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait: `timeout_s` for an answer, be the cloud busy or gone; `silent_s` for any sign of life.

    `accepts_change` goes on with another target than the text was begun with, and says so. With `has_others` there are
    more servers: one that is silent is left sooner where nothing hurries, and the next one gets a moment where it does.
    """

    timeout_s: float = 30.0
    falls_back: bool = False
    accepts_change: bool = False
    has_others: bool = False

    @property
    def silent_s(self) -> float:
        """How long without a sign of life before the cloud counts as gone."""
        return min(FALLBACK_S, self.timeout_s) if self.falls_back else self.timeout_s

    @property
    def ping_s(self) -> float:
        """How long an answer to a health check may take. Round trips beyond it count as no answer."""
        calm_s = _OTHERS_PING_S if self.has_others else PING_S
        return min(_PING_S if self.falls_back else calm_s, self.timeout_s)

    @property
    def quick_s(self) -> float:
        """How long the first try may take before it is asked whether anybody is there."""
        return min(_QUICK_S if self.falls_back else _QUICK_WAITING_S, self.timeout_s)

    @property
    def move_s(self) -> float:
        """How long a sign of life of the next server may take, beyond `silent_s` where that is short."""
        return _MOVE_S if self.falls_back else self.ping_s
