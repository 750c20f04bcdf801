"""How much memory a large folder of lessons takes to be read: made up from one lesson with other ids each time.

    python -m bench.learn_store [--gigabytes 1] [--from lessons]

The folder is written to a temporary place. `choose`, which training begins with, and `learn status` then run in
processes of their own; what they held at most is printed beside what a process holds that only imports the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np

from skydraft.learning.lessons import Store, encode

_FILE_BYTES = 64 << 20
_PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
_IMPORTS = """
from pathlib import Path
from skydraft.learning.dataset import Usable, choose
from skydraft.learning.lessons import Store
"""
PROGRAMS = {
    "imports alone": _IMPORTS,
    "choose (training)": _IMPORTS + "print(len(choose(Store(Path({folder!r})), Usable()).lessons), end=' ')\n",
    "learn status": "import contextlib, io\nfrom skydraft.cli.main import run\n"
    "with contextlib.redirect_stdout(io.StringIO()):\n    run(['learn', 'status', {folder!r}])\n",
}


def fill(folder: Path, source: Path, num_bytes: int) -> int:
    """Write so many bytes of lessons; returns how many lessons these are."""
    lessons = list(islice(Store(source).lessons(Counter()), 50))
    rng = np.random.default_rng(0)
    written = number = 0
    folder.mkdir(parents=True, exist_ok=True)
    while written < num_bytes:
        with (folder / f"lessons-{written // _FILE_BYTES + 1:08d}.jsonl").open("ab") as file:
            for lesson in lessons:
                prompt_ids = tuple(rng.integers(0, 150_000, len(lesson.prompt_ids)).tolist())
                written += file.write(encode(lesson.model_copy(update={"prompt_ids": prompt_ids})))
                number += 1
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--from", dest="source", type=Path, default=Path("learn-bench/lessons"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "lessons"
        number = fill(folder, given.source, int(given.gigabytes * 1e9))
        print(f"{number} lessons, {Store(folder).size().num_bytes / 1e9:.2f} GB")
        for name, program in PROGRAMS.items():
            began = time.perf_counter()
            code = program.format(folder=str(folder)) + _PEAK
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            print(f"{name:<20}{time.perf_counter() - began:>8.1f} s   {done.stdout.strip()} MB at most")


if __name__ == "__main__":
    main()
