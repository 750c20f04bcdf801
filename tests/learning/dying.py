"""Runs a command again and again, each time in a new process that ends at some moment. As a script: see `main`."""

import contextlib
import errno
import importlib
import itertools
import json
import os
import pkgutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# (what is called, which call of it, whether it writes), in the order of a run; after @ what its first argument names
MOMENTS = [
    ("skydraft.lab.learning.lessons:_append@/task/", 3, True),  # an answer
    ("skydraft.lab.learning.halves.Halves:activations", 9, False),
    ("skydraft.lab.learning.training.Training:_step", 3, False),
    ("skydraft.lab.learning.training.Training:_counts", 2, False),
    ("skydraft.lab.learning.training:write_adapter", 1, True),
    ("skydraft.lab.learning.training:write_whole", 1, True),  # what was measured
    ("os:replace@/.trial", 1, False),  # within the writing of one
    ("skydraft.lab.learning.calibrating:labelled", 3, False),
    ("skydraft.lab.learning.calibrating:write_whole", 1, True),
    ("skydraft.models.adapters:write_whole", 1, True),
    ("skydraft.cli.learn_run:write_whole", 1, True),  # what the run did
]


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)


def find_no_room() -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def at(moment: tuple[str, int, bool], end: Callable[[], NoReturn]) -> None:
    """End this process, or the call, at that call."""
    called, _, named = moment[0].partition("@")
    place, _, name = called.partition(":")
    owner: Any = pkgutil.resolve_name(place)
    real, calls = getattr(owner, name), itertools.count(1)

    def call(*args: Any, **given: Any) -> Any:
        if named in str(args[0]) and next(calls) == moment[1]:
            end()
        return real(*args, **given)

    setattr(owner, name, call)


def in_child(work: Callable[[], int]) -> tuple[int, str]:
    """(exit status, below 0 for a signal; what was said)"""
    with tempfile.TemporaryFile("w+") as said:
        if not (child := os.fork()):
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                status = work()
            said.flush()
            os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        return status, said.read()[-3000:]


def main(homes: list[str], command: list[str]) -> list[tuple[int, str]]:
    """Run undisturbed in the first home; in the other one with a full disk and a death at each moment, and to the end.

    Returns what `in_child` does, in this order.
    """
    for name in ("accelerate", "gguf", "peft"):  # once, before the forks
        importlib.import_module(name)
    from skydraft.cli import learn_run
    from skydraft.cli.main import run
    from skydraft.lab.learning.training import Trained, TrainSettings

    vars(learn_run)["_SETTINGS"] = TrainSettings(rank=8, num_layers=1, rate=0.01)
    Trained.objection = ""  # type: ignore[method-assign]  # the gain of so few answers is not certain

    def attempt(home: str, *ending: Any) -> tuple[int, str]:
        def work() -> int:
            os.environ["SKYDRAFT_HOME"] = home
            if ending:
                at(*ending)
            return run(command)

        return in_child(work)

    ends = [(moment, end) for moment in MOMENTS for end in (find_no_room, die) if end is die or moment[2]]
    return [attempt(homes[0]), *(attempt(homes[1], *each) for each in ends), attempt(homes[1])]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(sys.argv[2:4], sys.argv[4:])))
