"""The laws on the real pair: a sample of what `python -m bench identity` runs in full, and the engine's promises. Of
conversations: KV is reused, and the text is that of a prompt read anew.
"""

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

import skydraft
from bench.bare_loop import BareLoop
from bench.workload import prompts
from skydraft import DecodingParams, Engine, Generation, decoding_params, make_plan
from skydraft.models import cache_dir, default_pair, resolve
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import beginning_ids, prompt_ids

from ..conftest import link_models
from .conftest import DRAFT_SEATS, OPTIONS, TARGET_SEATS, generate

DEV = prompts()
SHORT = DecodingParams(max_new_tokens=16)
IDENTITY: dict[str, tuple[str, int, DecodingParams]] = {
    "greedy, k=2": (DEV[24], 2, SHORT),
    "T=0.8, k=5": (DEV[14], 5, replace(SHORT, temperature=0.8, seed=7)),
    "T=0.8, k=8": (DEV[53], 8, replace(SHORT, temperature=0.8, seed=8)),
    "penalty and n-gram ban": (DEV[48], 5, replace(SHORT, repetition_penalty=1.1, no_repeat_ngram_size=3)),
    "zh-short": (DEV[12], 5, decoding_params("zh-short", max_new_tokens=24)),
    "zh-short, T=0.8": (DEV[2], 5, decoding_params("zh-short", temperature=0.8, max_new_tokens=24)),
    "longer than 512 tokens": ("请总结：" + "\n".join(DEV)[:850], 5, replace(SHORT, max_new_tokens=12)),
}
Messages = list[dict[str, str]]


def answer(talk: Messages, seats: dict[str, Engine], scope: str, num_tokens: int = 6) -> Generation:
    params = DecodingParams(max_new_tokens=num_tokens, temperature=0.7, seed=len(talk))
    plan = make_plan("lossless", k=4)  # in which both models read each prompt
    with skydraft.generate(messages=talk, plan=plan, params=params, cache_scope=scope, **seats) as generation:
        return generation.run()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_later_turn_is_the_same_messages_read_anew(edge: Engine, cloud: Engine) -> None:
    seats, kept = {"edge": edge, "cloud": cloud}, []
    for engine in seats.values():  # which know nothing of other tests
        engine.forget_kept()
    talk: Messages = [user(DEV[0] * 7)]  # longer than a part of a prompt
    for turn in range(3):
        if turn == 1:  # another conversation and one that is not kept: of two seats of the target none is left
            answer([user(DEV[1])], seats, "talks", 1)
            answer([user(DEV[2])], seats, "", 1)
        reused, fresh = (answer(talk, seats, scope) for scope in ("talks", ""))
        assert reused.token_ids == fresh.token_ids and reused.origins == fresh.origins
        cached = reused.stats.cached_tokens
        kept.append((cached.edge >= edge.max_batch_rows, cached.cloud >= edge.max_batch_rows))
        talk += [{"role": "assistant", "content": reused.text}, user(DEV[turn + 10])]
    assert (DRAFT_SEATS, TARGET_SEATS) == (3, 2)
    assert kept == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("case", IDENTITY)
def test_lossless_gives_the_tokens_of_cloud(case: str, edge: Engine, cloud: Engine) -> None:
    prompt, k, params = IDENTITY[case]
    expected = generate(prompt, "cloud", edge, cloud, params)
    got = generate(prompt, "lossless", edge, cloud, params, k)
    assert got.token_ids == expected.token_ids
    assert got.text == expected.text
    assert set(expected.origins) == {"cloud"}


def test_f14_edge_is_a_plain_llama_cpp_loop(edge: Engine, cloud: Engine) -> None:
    path = resolve(default_pair().draft, cache_dir(), offline=True)
    assert path is not None
    with closing(BareLoop(path, OPTIONS.num_threads)) as bare:
        cut = len(beginning_ids(edge.vocab))
        assert cut > 10
        for prompt in (DEV[3], DEV[30], DEV[58]):
            expected = bare.generate(prompt_ids(edge.vocab, asked(prompt)), 32, cut)
            assert list(generate(prompt, "edge", edge, cloud, DecodingParams(max_new_tokens=32)).token_ids) == expected


def test_peak_memory_is_the_two_files_and_a_gigabyte(edge: Engine, cloud: Engine, tmp_path: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    paths = [resolve(name, cache_dir(), offline=True) for name in (default_pair().draft, default_pair().target)]
    allowed = sum(path.stat().st_size for path in paths if path) + 1e9
    prompt = "今天天气很好。" * 20
    link_models(tmp_path)
    code = (  # without probing, which takes two minutes here
        "import re, sys; from skydraft.cli.main import run; from skydraft.engines import probe;"
        "probe.probe = lambda *_: probe.RowProfile(1, (1.0,) * 8);"
        f"status = run(['generate', '{prompt}', '--max-new-tokens', '8', '--quiet', '--offline',"
        f"'--context', '4096', '--threads', '{OPTIONS.num_threads}']);"
        "print(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"SKYDRAFT_HOME": str(tmp_path)},
    )  # fmt: skip
    peak = int(done.stdout.split()[-1]) * 1024  # not ru_maxrss, which a child inherits from the process that forked it
    assert 1e9 < peak <= allowed
