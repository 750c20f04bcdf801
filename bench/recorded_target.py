"""A target that waits instead of computing: what it says was recorded, and a forward of n rows takes what is stated.

    python -m bench recorded_target --texts FILE --costs 45,45,45     # serves it on a free port, and says which

For measurements of the edge and the link on one machine, where a second model would slow the first. A text is recorded
as the target wrote it, with the draft model's own choice in each place. After a wrong token both go on by place: a
target looks at nothing behind the first difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.recorded_draft import KeptRow, KeptRows, RecordedDraft
from skydraft.access.limits import Limits
from skydraft.cloud.options import ServeOptions
from skydraft.cloud.server import serve
from skydraft.cloud.worker import Worker
from skydraft.decoding.race.cost_model import row_ms
from skydraft.engines.base import Engine, Sequence
from skydraft.engines.checkpoints.engine import weights_fingerprint
from skydraft.engines.options import EngineOptions
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.toy import ListEngine
from skydraft.engines.vocab import Rows, TokenIds
from skydraft.models import default_pair, resolve
from skydraft.models.cache import cache_dir

MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class RecordedText:
    """`draft_ids[n]` is the draft model's choice after the prompt and `target_ids[:n]`."""

    kind: str
    prompt: str
    prompt_ids: list[int]
    target_ids: list[int]
    draft_ids: list[int]


class Recording:
    """Recorded texts, by their prompts."""

    def __init__(self, texts: Iterable[RecordedText]) -> None:
        self._texts = {tuple(text.prompt_ids): text for text in texts}
        self._lengths = sorted(set(map(len, self._texts)))

    def at(self, token_ids: Seq[int]) -> tuple[RecordedText, int]:
        """The text that begins with these tokens, and the place after them; beyond its end it is the last one."""
        for length in self._lengths:
            if text := self._texts.get(tuple(token_ids[:length])):
                return text, min(len(token_ids) - length, len(text.target_ids) - 1)
        raise LookupError("no such prompt was recorded")


class KeptChoices:
    """As `KeptRows`, of a recording: all of the weight is on the recorded choice. With `is_wrong` on another token."""

    def __init__(self, real: Engine, recording: Recording, *, is_wrong: bool = False) -> None:
        self.real, self._recording, self._is_wrong = real, recording, is_wrong

    def after(self, token_ids: TokenIds) -> KeptRow:
        text, place = self._recording.at(token_ids.tolist())
        chosen = text.target_ids[place] ^ 1 if self._is_wrong else text.draft_ids[place]
        return KeptRow(np.array([chosen], np.int32), np.zeros(1, np.float32), -200.0)


class RecordedModel(ListEngine):
    """The target of a recording. A forward of n rows takes `costs[n - 1]` ms, and one over a prompt as one row."""

    has_kernels = False  # none whose rows would have to be compared

    def __init__(self, real: Engine, recording: Recording, costs: Seq[float], max_sequences: int) -> None:
        super().__init__("recorded")
        self.vocab, self.fingerprint, self.context_len = real.vocab, _weights_of_the_target(), 4096
        self.max_sequences, self.max_output_rows = max_sequences, len(costs)
        self.profile = RowProfile(len(costs), tuple(costs))
        self._recording = recording

    def forward(self, feeds: Seq[tuple[Sequence, Seq[int] | TokenIds]], *, want_logits: bool) -> list[Rows]:
        num_rows = sum(len(token_ids) for _, token_ids in feeds) if want_logits else 1
        until, found = time.perf_counter() + row_ms(self.profile.forward_ms, num_rows) / 1e3, list[Rows]()
        for sequence, token_ids in feeds:
            rows = np.zeros((len(token_ids) if want_logits else 0, self.vocab.size), np.float32)
            for index, token_id in enumerate(token_ids):
                sequence.slot.append(int(token_id))
                if want_logits:
                    text, place = self._recording.at(sequence.slot)
                    rows[index, text.target_ids[place]] = 1.0
            found.append(rows)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return found


def kept_target(step_ms: float, max_sequences: int) -> Engine:
    """The real target, for texts that no recording has. Each row is computed once, and a forward takes `step_ms`."""
    real = skydraft.load(default_pair().target, EngineOptions(2048))
    engine = RecordedDraft(KeptRows(real), step_ms)
    engine.max_sequences, engine.max_output_rows, engine.has_kernels = max_sequences, MAX_ROWS, False
    engine.profile = RowProfile(MAX_ROWS, (step_ms,) * MAX_ROWS)
    return engine


def _weights_of_the_target() -> str:
    """What the calibration of the pair knows it by."""
    path = resolve(default_pair().target, cache_dir(), offline=True)
    return weights_fingerprint([path]) if path else "recorded"


class RecordedServer:
    """`main` in a process of its own, for as long as the `with` block lasts. `port` is where it listens."""

    def __init__(self, texts: Path, costs: Seq[float], num_sessions: int = 4, *, is_real: bool = False) -> None:
        self._command = [sys.executable, "-m", "bench", "recorded_target", "--texts", str(texts)]
        self._command += ["--sessions", str(num_sessions), "--costs", ",".join(map(str, costs))]
        self._command += ["--real"] if is_real else []

    def __enter__(self) -> RecordedServer:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        self._process.communicate()


def read_texts(path: Path) -> list[RecordedText]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [RecordedText(**json.loads(line)) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, required=True, help="as `python -m bench link` records them")
    parser.add_argument("--costs", default="45", help="ms of a forward of 1, 2, … rows")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--real", action="store_true", help="the demo pair's target, for texts that were not recorded")
    given = parser.parse_args()
    costs, recording = [*map(float, given.costs.split(","))], Recording(read_texts(given.texts))
    if given.real:
        engine = kept_target(costs[0], given.sessions)
    else:
        real = skydraft.load(default_pair().draft, threads=1)  # for its vocabulary, which is the target's
        engine = RecordedModel(real, recording, costs, given.sessions)
    options = ServeOptions(port=0, limits=Limits(max_sessions=given.sessions))
    serve(lambda: Worker(engine, options.limits), options, lambda worker, port: print(port, flush=True))
