"""The section that says what is kept of generations, and where: lessons, and traces of their times."""

from __future__ import annotations

import os
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
from skydraft.decoding.traced import Start, traced
from skydraft.engines.base import Engine
from skydraft.errors import OptionError
from skydraft.tracing import Tracing

if TYPE_CHECKING:
    from skydraft.edge.connection import Cloud
    from skydraft.learning.collect import Collector


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """Who keeps what is corrected, and who sends traces; None where nobody asked for it."""

    collector: Collector | None = None
    tracing: Tracing | None = None
    parent: str = ""  # the trace that a command belongs to which answers one user

    def check(self, gate: GateChoice) -> None:
        """Raise OptionError where nothing can be learned."""
        if self.collector and not gate.plan.verifies:
            raise OptionError("--learn does not apply here: the draft model works alone, and nothing is checked.")

    def start(
        self, request: GenerateRequest, *, edge: Engine | None = None, cloud: Engine | Cloud | None = None
    ) -> AbstractContextManager[Generation]:
        """A generation that ends with the block; what was asked to be kept of it is kept then."""
        begin: Start = self.collector.start if self.collector else api.start
        if self.tracing:
            begin = traced(self.tracing, begin, self.parent)
        return begin(request, edge=edge, cloud=cloud)


def _keep(learn: Path | None, otlp: str | None) -> KeepChoice:
    context = click.get_current_context()
    tracing = Tracing(f"skydraft-{context.info_name}", otlp, TERMINAL.say) if otlp else None
    if tracing:
        context.call_on_close(tracing.close)
    parent = "" if context.info_name == "gateway" else os.environ.get("TRACEPARENT", "")
    return KeepChoice(_collector(learn) if learn else None, tracing, parent)


def _collector(learn: Path) -> Collector:
    from skydraft.learning.collect import Collector

    collector = Collector(learn, notify=TERMINAL.say)
    click.get_current_context().call_on_close(collector.close)
    TERMINAL.say(
        f"learning: prompts, answers and their corrections are kept in {learn}, on this machine alone. "
        f"To delete them: skydraft learn forget {learn}"
    )
    return collector


keep_section = Section(
    "keep",
    "Learning and traces",
    _keep,
    [
        option(
            "--learn", "DIR", "Keep what is asked and answered, and what the target corrects, in DIR, to train the "
            "draft model with (see: skydraft learn).", type=Path,
        ),
        option(
            "--otlp", "URL", "Send OpenTelemetry traces, which hold no text, to the collector at URL (OTLP over HTTP).",
        ),
    ],
)  # fmt: skip
