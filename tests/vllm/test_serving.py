"""Texts over vLLM are those of transformers, whatever happens to vLLM meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import skydraft
from skydraft.choosing.chooser import Chooser
from skydraft.choosing.sampling import gumbel_noise
from skydraft.config import DecodingParams, decoding_params
from skydraft.engines.options import EngineOptions
from tests.engines.tiny_checkpoint import save_model
from tests.serving import Serving
from tests.vllm.conftest import CONTEXT, SHAPE, on_vllm

NUM_PROMPTS = 200
MARGIN = 1e-3  # logits; float32 kernels of two libraries differ by 1e-5
STYLES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"no_repeat_ngram_size": 2},
    {"style": "zh-short"},
]


def prompts(num: int, length: int = 12) -> list[str]:
    """Random texts of Chinese and ASCII characters; each is another."""
    rng = random.Random(7)
    letters = "我们你好世界人在说高兴大的一abc 123，。"
    return [f"{number}" + "".join(rng.choices(letters, k=length)) for number in range(num)]


def params_of(number: int, temperature: float) -> DecodingParams:
    given = dict(STYLES[number % len(STYLES)])
    return decoding_params(given.pop("style", None), max_new_tokens=32, temperature=temperature, seed=number, **given)


def written(server: Serving | Any, edge: Any, prompt: str, params: DecodingParams, mode: str) -> tuple[int, ...]:
    cloud = skydraft.connect(server.address) if isinstance(server, Serving) else server
    plan = skydraft.make_plan(mode)
    generation = skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params, raw=True).run()
    return tuple(generation.token_ids)


def unexplained(found: tuple[int, ...], other: tuple[int, ...], prompt: str, params: DecodingParams, on: Any) -> bool:
    """Whether two texts differ where transformers saw no near tie between the two tokens."""
    if found == other:
        return False
    pairs = zip(found, other, strict=False)
    at = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
    if at is None:
        return True  # one of them goes on where the other has ended
    asked = on.vocab.encode(prompt)
    prefix = np.array([*asked, *found[:at]], np.int32)
    sequence = on.open(tuple(int(each) for each in prefix))
    (row,) = np.asarray(sequence.extend([int(prefix[-1])]), np.float32)
    sequence.close()
    both = np.array([found[at], other[at]], np.int64)
    scores = np.asarray(Chooser(params, on.vocab, len(asked)).constrain(row, prefix), np.float64)[both]
    if params.temperature:
        scores = scores + params.temperature * gumbel_noise(params.seed, at, both)
    print(f"  a near tie: {abs(scores[0] - scores[1]):.1e} apart, in logits")
    return bool(abs(scores[0] - scores[1]) > MARGIN)


def at_once(num_clients: int, asks: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(num_clients) as pool:
        return [each.result() for each in [pool.submit(ask) for ask in asks]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lossless_is_what_the_same_vllm_writes_alone_and_what_transformers_writes(
    server: Serving, load: Any, temperature: float
) -> None:
    edges = threading.local()

    def both(number: int, prompt: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        edges.model = getattr(edges, "model", None) or load(1)
        params = params_of(number, temperature)
        lossless = written(server, edges.model, prompt, params, "lossless")
        return lossless, written(server, edges.model, prompt, params, "cloud")

    texts = prompts(NUM_PROMPTS)
    found = at_once(8, [lambda n=n, p=p: both(n, p) for n, p in enumerate(texts)])  # type: ignore[misc]
    target = load(0)
    differ = away = 0
    for number, (prompt, (lossless, alone)) in enumerate(zip(texts, found, strict=True)):
        params = params_of(number, temperature)
        by_transformers = written(target, target, prompt, params, "cloud")
        assert not unexplained(lossless, alone, prompt, params, target), prompt
        assert not unexplained(lossless, by_transformers, prompt, params, target), prompt
        differ += lossless != alone
        away += lossless != by_transformers
    print(f"T={temperature}: {differ} of {NUM_PROMPTS} differ from the target alone, {away} from transformers")
    assert differ + away <= NUM_PROMPTS / 50  # in float32 near ties are rare


def test_sampled_tokens_have_the_probabilities_of_the_target(server: Serving, load: Any) -> None:
    from scipy.stats import chisquare

    edge, target, prompt, num = load(1), load(0), "我们在说", 2000
    asked = edge.vocab.encode(prompt)
    sequence = target.open(asked)
    (row,) = np.asarray(sequence.extend([asked[-1]]), np.float64)
    best = np.argsort(row)[-12:]
    expected = np.exp(row[best] - row[best].max())
    expected *= num / expected.sum()

    def sampled(seed: int) -> int:
        params = decoding_params(max_new_tokens=1, temperature=1.0, top_k=12, seed=seed)
        return written(server, edge, prompt, params, "cloud")[0]

    counts = Counter(at_once(1, [lambda s=s: sampled(s) for s in range(num)]))  # type: ignore[misc]
    assert set(counts) <= set(best.tolist())
    often = expected >= 5
    observed = np.array([counts[int(token)] for token in best], float)
    folded = [np.append(each[often], each[~often].sum() or 1e-9) for each in (observed, expected)]
    chi = chisquare(folded[0], folded[1] * folded[0].sum() / folded[1].sum())
    print(f"chi-square {chi.statistic:.1f} in {len(folded[0])} bins, p = {chi.pvalue:.3f}")
    assert chi.pvalue > 0.01


def test_an_engine_process_that_is_killed_loses_and_doubles_nothing(folders: tuple[Path, Path], load: Any) -> None:
    health: list[bool] = []
    texts = prompts(4)
    params = [decoding_params(max_new_tokens=150, temperature=0.8, seed=n) for n in range(4)]
    target = load(0)
    expected = [written(target, target, p, c, "cloud") for p, c in zip(texts, params, strict=True)]
    others = set(multiprocessing.active_children())
    with on_vllm(folders[0], health=health) as server:
        (engine,) = set(multiprocessing.active_children()) - others
        assert engine.pid

        def text(number: int, mode: str) -> tuple[int, ...]:
            cloud = skydraft.connect(server.address, timeout_s=300)
            return written(cloud, load(1), texts[number], params[number], mode)

        pool = ThreadPoolExecutor(4)
        modes = ["lossless", "cloud", "lossless", "cloud"]
        asked = [pool.submit(text, number, mode) for number, mode in enumerate(modes)]
        server.wait_until(lambda: server.num_sessions == 4, 120)
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(engine.pid, signal.SIGKILL)
        found = [each.result(300) for each in asked]
        pool.shutdown()
        print(f"health {health}, all done {time.monotonic() - began:.0f} s after the kill")
        assert found == expected and health == [False, True]


def test_eight_clients_where_the_kv_of_three_fits(folders: tuple[Path, Path], load: Any) -> None:
    texts = prompts(8, length=150)
    params = [decoding_params(max_new_tokens=60, temperature=0.8, seed=n) for n in range(8)]
    target = load(0)
    expected = [written(target, target, p, c, "cloud") for p, c in zip(texts, params, strict=True)]
    # 24 blocks of 32 tokens and one that vLLM keeps; prompts in parts of 64 tokens.
    tight = ("block_size=32", "num_gpu_blocks_override=25", "max_num_batched_tokens=64", "max_num_seqs=8")
    with on_vllm(folders[0], *tight) as server:
        edges = [load(1) for _ in texts]
        asks = [
            lambda n=n: written(server, edges[n], texts[n], params[n], "lossless" if n % 2 else "cloud")
            for n in range(8)
        ]  # type: ignore[misc]
        assert at_once(8, asks) == expected


@pytest.mark.parametrize("config", ["Qwen3Config", "LlamaConfig"])
def test_each_architecture_writes_what_transformers_writes(config: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"head_dim": 32}
    folder = save_model(tmp_path, config, seed=3, **SHAPE, **more)
    target = skydraft.load(folder, EngineOptions(context_len=CONTEXT, num_threads=1))
    with on_vllm(folder) as server:
        for number, text in enumerate(("你好世界", "我们在说abc", "大的")):
            params = decoding_params(max_new_tokens=40, temperature=0.8 * (number % 2), seed=number)
            lossless = written(server, target, text, params, "lossless")
            assert lossless == written(target, target, text, params, "cloud")
