"""The interface between the service and the code that computes verdicts: the worker, or the judge over vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from skydraft.cloud.docket import Docket
from skydraft.cloud.seats import Served


class Judge(Protocol):
    """Serves the jobs of its docket in one thread.

    That thread calls `on_health` when judging becomes impossible for a while, and when it becomes possible again.
    """

    docket: Docket
    on_health: Callable[[bool], None]

    @property
    def served(self) -> Served:
        """The model and settings that it runs."""

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` on the judge's thread before its next step. Any thread may call this; it returns at once."""

    def run(self) -> None:
        """Serve until the docket is stopped. Every job is answered, even after a failure."""

    def close(self) -> None:
        """Release the model, after `run` or without it. A second call does nothing."""
