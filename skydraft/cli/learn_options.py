"""The section that says whether, and where, what the target corrects is kept to learn from."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from skydraft import api
from skydraft.cli.options import GateChoice
from skydraft.cli.sections import Section, option
from skydraft.cli.terminal import TERMINAL
from skydraft.decoding.generation import Generation
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.base import Engine
from skydraft.errors import OptionError

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud
    from skydraft.learning.collect import Collector


@dataclass(frozen=True, slots=True)
class LearnChoice:
    """Who keeps what is corrected; None where nobody asked for it."""

    collector: Collector | None = None

    def check(self, gate: GateChoice) -> None:
        """Raise OptionError where nothing can be learned."""
        if self.collector and not gate.plan.verifies:
            raise OptionError("--learn does not apply here: the draft model works alone, and nothing is checked.")

    def start(
        self, request: GenerateRequest, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None
    ) -> AbstractContextManager[Generation]:
        """A generation that ends with the block, and what it teaches is kept where that was asked for."""
        begin = self.collector.start if self.collector else api.start
        return begin(request, edge=edge, cloud=cloud)


def _learn(learn: Path | None) -> LearnChoice:
    if learn is None:
        return LearnChoice()
    from skydraft.learning.collect import Collector

    collector = Collector(learn, notify=TERMINAL.say)
    click.get_current_context().call_on_close(collector.close)
    TERMINAL.say(
        f"learning: prompts, answers and their corrections are kept in {learn}, on this machine alone. "
        f"To delete them: skydraft learn forget {learn}"
    )
    return LearnChoice(collector)


learn_section = Section(
    "learn",
    "Learning",
    _learn,
    [
        option(
            "--learn", "DIR", "Keep what is asked and answered, and what the target corrects, in DIR, to train the "
            "draft model with (see: skydraft learn).", type=Path,
        )
    ],
)  # fmt: skip
