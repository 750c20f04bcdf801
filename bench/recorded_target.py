"""A target that waits instead of computing: what it says was recorded, and each forward takes what is stated.

    python -m bench recorded_target --forward-ms 45     # serves it on a free port, and says which

For measurements of the edge and the link on one machine, where a second model would slow the first. What the table does
not know, the model of the demo pair computes once, which takes longer than stated; so what is timed is run before.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

import skydraft
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.server import serve
from skydraft.cloud.worker import Worker
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.options import EngineOptions
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ListEngine
from skydraft.engines.vocab import Rows, TokenIds, Vocab
from skydraft.models import default_pair

MAX_ROWS = 32
Table = dict[str, int]


def key_of(token_ids: Seq[int] | TokenIds) -> str:
    """A name for prompt and text."""
    return hashlib.sha256(np.asarray(token_ids, np.int32).tobytes()).hexdigest()[:20]


def record(engine: Engine, table: Table) -> None:
    """Have an engine note the best token of each row that it computes."""
    forward = engine.forward

    def noted(feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        found = forward(feeds, want_logits=want_logits)
        for (sequence, token_ids), rows in zip(feeds, found, strict=True):
            before = [*sequence.token_ids[: sequence.length].tolist()]
            for index, row in enumerate(rows if want_logits else ()):
                table[key_of([*before, *map(int, token_ids[: index + 1])])] = int(np.argmax(row))
        return found

    engine.forward = noted  # type: ignore[method-assign]


class RecordedModel(ListEngine):
    """An engine over a table. A slot is the list of its tokens."""

    has_kernels = True  # as the engine that it stands for

    def __init__(
        self, vocab: Vocab, fingerprint: str, table: Table, forward_ms: float, real: Engine | None = None
    ) -> None:
        super().__init__("recorded")
        self.vocab = vocab
        self.context_len = 4096
        self.max_sequences = 8
        self.fingerprint = fingerprint  # of the one that was recorded: a calibration is for that
        self.num_unknown = 0
        self._table = table
        self._real = real
        self._reading: Sequence | None = None
        self._forward_s = forward_ms / 1e3
        self.profile = RowProfile(invariant_rows=MAX_ROWS, forward_ms=(forward_ms,) * MAX_ROWS)

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        until = time.perf_counter() + self._forward_s
        found: list[Rows] = []
        for sequence, token_ids in feeds:
            rows = np.zeros((len(token_ids) if want_logits else 0, self.vocab.size), np.float32)
            for index, token_id in enumerate(token_ids):
                sequence.slot.append(int(token_id))
                if want_logits:
                    self.write_row(rows[index], sequence.slot)
            found.append(rows)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found

    def write_row(self, row: Rows, token_ids: list[int]) -> None:
        """Make the recorded token the best one of a row of zeros."""
        row[self._token_after(token_ids)] = 1.0

    def _token_after(self, token_ids: list[int]) -> int:
        token = self._table.get(key := key_of(token_ids))
        if token is None:
            self.num_unknown += 1
            token = self._table[key] = self._computed(token_ids)
        return token

    def _computed(self, token_ids: list[int]) -> int:
        """The real model's choice; 0 without one. Several conversations share its one sequence."""
        if self._real is None:
            return 0
        whole = np.array(token_ids, np.int32)
        if self._reading is None or not np.array_equal(self._reading.token_ids[:8], whole[:8]):
            if self._reading is not None:
                self._reading.close()
            self._reading = self._real.open(token_ids[:-1])
        self._reading.align(whole[:-1])
        for start in range(self._reading.length, len(whole), self._real.invariant_rows):
            rows = self._reading.extend(whole[start : start + self._real.invariant_rows])
        return int(np.argmax(rows[-1]))


class RecordedServer:
    """`main` in a process of its own, for as long as the `with` block lasts. `port` is where it listens."""

    def __init__(self, forward_ms: float) -> None:
        self._command = [sys.executable, "-m", "bench", "recorded_target", "--forward-ms", str(forward_ms)]

    def __enter__(self) -> RecordedServer:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forward-ms", type=float, default=45.0)
    asked = parser.parse_args()
    target = skydraft.load(default_pair().target, EngineOptions(num_threads=1))
    engine = RecordedModel(target.vocab, target.fingerprint, {}, asked.forward_ms, target)
    options = ServeOptions(port=0)
    serve(lambda: Worker(engine, options.limits), options, lambda worker, port: print(port, flush=True))
