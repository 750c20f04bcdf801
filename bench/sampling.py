"""What choosing a token costs: microseconds of a thread for a row, beside another checkout, row by row in turns.

    python -m bench.sampling [--beside PATH] [--rows N] [--vocab N] [--no-model]

Rows are those of the draft model of the demo pair along dev prompts, and normal ones with a head of likely tokens.
Times are means over the rows of medians; each checkout has a process of its own, and their tokens are compared.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workload import machine, prompts

HERE = Path(__file__).parent.parent
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.1},
    "T=0.7": {"temperature": 0.7},
    "T=0.7, penalty": {"temperature": 0.7, "repetition_penalty": 1.1},
    "T=1": {"temperature": 1.0},
    "T=0.7 top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T=0.7 top-p 0.8 top-k 20": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "T=0.8 top-k 50": {"temperature": 0.8, "top_k": 50},
    "T=0.8 min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}
# Answers (setting, row) with the token and the median time of 15 choices.
CHILD = """
import json, statistics, sys, time
import numpy as np
from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams
from skydraft.engines.vocab import Vocab
rows, vocab, prefix = np.load(sys.argv[1]), Vocab((b"a",), list), np.arange(300, dtype=np.int32)
for line in sys.stdin:
    options, at = json.loads(line)
    chooser, spent = Chooser(DecodingParams(seed=at, **options), vocab, 10), []
    for _ in range(15):
        began = time.thread_time()
        token = chooser.choose(rows[at], prefix)
        spent.append(time.thread_time() - began)
    print(json.dumps([token, statistics.median(spent) * 1e6]), flush=True)
"""


def model_rows(num_rows: int) -> npt.NDArray[np.float32]:
    """Raw logits of the draft model along the dev prompts, [num_rows, vocab]."""
    import skydraft
    from skydraft.models import default_pair
    from skydraft.prompts.messages import asked
    from skydraft.prompts.pair import prompt_ids

    with skydraft.load(default_pair().draft) as engine:
        rows, texts = [], prompts()
        while len(rows) < num_rows:
            prompt = prompt_ids(engine.vocab, asked(texts[len(rows) // 16 % len(texts)]))
            sequence, token_id = engine.open(prompt), prompt[-1]
            for _ in range(16):
                rows.append(sequence.extend([token_id])[0].copy())
                token_id = int(rows[-1].argmax())
            sequence.close()
    return np.array(rows)


def normal_rows(num_rows: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Normal logits of deviation 2.2 with a head of 300 tokens above them."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 2.2, (num_rows, vocab_size)).astype(np.float32)
    for row in rows:
        row[rng.integers(0, vocab_size, 300)] += rng.exponential(4, 300).astype(np.float32) + 6
    return rows


def compare(kind: str, rows: npt.NDArray[np.float32], checkouts: list[Path]) -> None:
    """A line for each setting."""
    with TemporaryDirectory() as folder:
        np.save(file := Path(folder) / "rows.npy", rows)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                cwd=folder, env={**os.environ, "PYTHONPATH": str(checkout)},
            ) for checkout in checkouts
        ]  # fmt: skip
        for name, options in SETTINGS.items():
            found = []
            for at in range(len(rows)):
                for child in children:
                    assert child.stdin and child.stdout
                    print(json.dumps([options, at]), file=child.stdin, flush=True)
                    found.append(json.loads(child.stdout.readline()))
            tokens, times = np.array(found).reshape(len(rows), len(children), 2).transpose(2, 1, 0)
            us = "".join(f"{each:>10.0f}" for each in times.mean(axis=1))
            print(f"{kind:<20}{name:<26}{us}{(tokens[0] != tokens[-1]).sum():>8} differ", flush=True)
        for child in children:
            child.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--no-model", action="store_true")
    given = parser.parse_args()
    checkouts = [*([given.beside] if given.beside else []), HERE]
    print(machine())
    print(f"{'rows':<20}{'setting':<26}" + "".join(f"{each.name:>10}" for each in checkouts) + "   us")
    if not given.no_model:
        compare("of the draft model", model_rows(given.rows), checkouts)
    compare("normal, with a head", normal_rows(given.rows, given.vocab), checkouts)


if __name__ == "__main__":
    main()
