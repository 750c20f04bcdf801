"""The pair of models behind the gateway, its model names for clients, and the cloud's health."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeAlias

from skydraft import api
from skydraft.config import DEFAULT_MODE, MODES
from skydraft.decoding.accounts.audits import Auditor
from skydraft.decoding.generation import Generation, Observer
from skydraft.decoding.plan import Plan, make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.edge.server import CHAT
from skydraft.engines.base import Engine
from skydraft.errors import CloudError, SkydraftError, TargetChanged
from skydraft.gateway.refusals import Refusal

PREFIX = "skydraft"
_LOOK_AGAIN_S = 2.0  # how long a ping's result stays valid
_PING_S = 0.5
CloudState: TypeAlias = Literal["up", "down", "local", "none"]


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft model, and a target in this process or in a cloud, or none. `observers` watch each generation. One of
    them may be the `auditor`."""

    edge: Engine
    cloud: Engine | Cloud | None = None
    observers: tuple[Observer, ...] = ()
    auditor: Auditor | None = None

    @property
    def far(self) -> Cloud | None:
        return None if isinstance(self.cloud, Engine) else self.cloud

    @property
    def cloud_name(self) -> str | None:
        """The target's name; "cloud" for a remote one, which avoids a request."""
        if self.cloud is None:
            return None
        return self.cloud.name if isinstance(self.cloud, Engine) else "cloud"

    @property
    def progress(self) -> tuple[int, int]:
        """(tokens read, all tokens) of the prompts that models in this process are reading now."""
        here = [side.prefixes.progress for side in (self.edge, self.cloud) if isinstance(side, Engine)]
        return sum(done for done, _ in here), sum(of for _, of in here)

    def telling(self, notify: Callable[[str], None]) -> Self:
        """Return a copy for one generation. `notify` gets lines about the cloud."""
        far = self.far
        return replace(self, cloud=replace(far, notify=notify)) if far else self

    def start(self, request: GenerateRequest) -> Generation:
        return api.start(request, edge=self.edge, cloud=self.cloud, observers=self.observers)

    def cancel(self) -> None:
        """End a `start` that waits for the cloud. It may then raise Cancelled. Any thread may call this."""
        if far := self.far:
            far.cancel()


class ModelNames:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._is_calibrated: bool | None = None  # None: unknown
        # The modes that a request may name. `auto` always may: its calibration may come later, or with an adapter.
        self._taken = ("edge",) if pair.cloud is None else tuple(MODES)
        self.default_mode = "edge" if pair.cloud is None else DEFAULT_MODE
        self._modes = {PREFIX: self.default_mode} | {f"{PREFIX}-{mode}": mode for mode in self._taken}  # by name

    @property
    def modes(self) -> list[str]:
        """The modes to list: without `auto` for an uncalibrated pair, without gated modes for a chat server."""
        is_chat = self._pair.far is not None and self._pair.far.kind == CHAT
        left_out = {mode for mode in MODES if is_chat and make_plan(mode).is_gated}
        left_out |= {"auto"} if self._is_calibrated is False else set()
        return [mode for mode in self._taken if mode not in left_out]

    @property
    def all(self) -> list[str]:
        names = [PREFIX, *(f"{PREFIX}-{mode}" for mode in self.modes)]
        # An adapter comes with its calibration, so all modes apply.
        return names + [f"{name}:{adapter}" for adapter in self._pair.edge.adapters.usable for name in self._modes]

    def mode_of(self, model: str) -> str:
        name, colon, adapter = model.partition(":")
        if name not in self._modes or (colon and adapter not in ("none", *self._pair.edge.adapters.names)):
            message = f"There is no model '{model[:80]}'. Use one of: {', '.join(self.all)}."
            raise Refusal(404, message, param="model", code="model_not_found")
        return self._modes[name]

    def plan_of(self, model: str, choice: Any) -> Plan:
        """Return the plan for a model name and the body's options. Raises OptionError or Refusal.

        With `local_only` a gated text stays on this machine.
        """
        named = self.mode_of(model)
        mode = choice.mode or named
        if mode not in self._taken:
            message = f"The mode '{mode}' is not available. Use one of: {', '.join(self._taken)}."
            raise Refusal(400, message, param="skydraft.mode")
        names_none = not choice.mode and model.partition(":")[0] == PREFIX and mode != "edge"
        plan = make_plan(None if names_none and choice.gate else mode, choice.gate, choice.k, choice.hand_back)
        if not choice.local_only or not plan.verifies or isinstance(self._pair.cloud, Engine):
            return plan
        if plan.may_go_alone:
            return make_plan("edge")
        message = f"The mode '{mode}' needs the cloud for each token, but local_only keeps the text here."
        raise Refusal(400, message, param="skydraft.local_only")

    def look(self) -> None:
        """Find out whether the pair is calibrated; ignore an unreachable cloud. Raises TargetChanged."""
        if self._pair.cloud is None or self._is_calibrated:
            return
        try:
            self._is_calibrated = api.is_calibrated(self._pair.edge, self._pair.cloud)
        except CloudError as error:
            if isinstance(error, TargetChanged):
                raise


def model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "skydraft"}


class CloudHealth:
    def __init__(self, pair: Pair) -> None:
        self._cloud = pair.cloud
        self._asked_at = float("-inf")
        self._last: CloudState = "down"

    def state(self) -> CloudState:
        """Return the state. Blocks for at most half a second."""
        if self._cloud is None or isinstance(self._cloud, Engine):
            return "none" if self._cloud is None else "local"
        if time.monotonic() - self._asked_at > _LOOK_AGAIN_S:
            self._asked_at = time.monotonic()  # concurrent callers get the last state
            try:
                self._cloud.ping(_PING_S)
                self._last = "up"
            except SkydraftError:
                self._last = "down"
        return self._last
