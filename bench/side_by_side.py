"""Tokens a second that the target writes when several texts share a forward, as `learn run` lets it.

python -m bench.side_by_side [--threads N]        with OMP_WAIT_POLICY=passive: with passive threads
"""

import argparse
import time

import skydraft
from bench.workload import machine
from skydraft.engines.options import EngineOptions
from skydraft.models import default_pair

_QUESTION = "小明有三个苹果，小红又给了他五个，请问一共有几个？" * 3
_STEPS, _MOST = 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=0)
    num_threads = parser.parse_args().threads
    options = EngineOptions(context_len=512, max_sequences=_MOST, shared_cache=True, num_threads=num_threads)
    with skydraft.load(default_pair().target, options) as engine:
        print(machine())
        ids = engine.vocab.encode(_QUESTION)
        sequences = [engine.open(ids) for _ in range(_MOST)]
        for number in (1, 2, 4, 8, _MOST):
            began = time.perf_counter()
            for step in range(_STEPS):
                engine.extend_batch([(sequence, [100 + step]) for sequence in sequences[:number]])
            step_s = (time.perf_counter() - began) / _STEPS
            print(f"{number:>2} texts  {1e3 * step_s:>5.0f} ms a step  {number / step_s:>5.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
