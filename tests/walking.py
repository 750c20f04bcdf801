"""Run in a process of its own, where no thread is older than the tracer: which modules a verified round enters.

Prints two lists as JSON: the modules at the edge, and those at the server.
"""

import json
import sys
import threading
from typing import Any

import skydraft
from skydraft.cli import generate as command
from skydraft.cli.main import run
from tests.serving import serving

_VALUES = {"types", "errors", "protocol.values"}  # what travels


class Tracer:
    """Modules of the package that were entered since `clear`, apart for the edge's two threads and all others."""

    def __init__(self) -> None:
        self.edge: set[str] = set()
        self.others: set[str] = set()
        self.verified: list[tuple[set[str], set[str]]] = []

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("skydraft."):
            thread = threading.current_thread()
            is_edge = thread is threading.main_thread() or thread.name == "skydraft edge"
            (self.edge if is_edge else self.others).add(name.removeprefix("skydraft."))

    def shown(self, tokens: Any) -> None:
        if all(token.origin in ("accepted", "recovered", "bonus") for token in tokens) and tokens[0].round > 2:
            self.verified.append((set(self.edge), set(self.others)))
        self.edge.clear()
        self.others.clear()


def main() -> None:
    tracer, show = Tracer(), command.show_tokens
    threading.setprofile(tracer)

    def shown(console: Any, tokens: Any) -> None:
        show(console, tokens)
        tracer.shown(tokens)

    command.show_tokens = shown
    with serving(skydraft.load("toy")) as server:
        sys.setprofile(tracer)
        given = f"--mode quality --hand-back 0 --cloud {server.address} --edge-model toy:drift=0.2 -n 60 -q".split()
        assert run(["generate", "你好世界", *given]) == 0
        sys.setprofile(None)
    assert tracer.verified, "no round was verified"
    edge, cloud = min(tracer.verified, key=lambda sides: len(sides[0] | sides[1]))
    # The command's own loop runs in a frame that is entered once.
    print("\n" + json.dumps([sorted(edge - _VALUES | {"cli.generate"}), sorted(cloud - _VALUES)]))


if __name__ == "__main__":
    main()
