"""Counts tokens of `lossless` against `cloud` on the real pair: they must be the same ids, all of them.

    python -m bench identity [--limit PROMPTS] [--max-new-tokens N] [--only TEXT] [--threads N] [--gpu-layers N]

All prompts at temperature 0 and 0.8 in `lossless`, by itself and with three block lengths, each with another
hand-back; the first twelve also with repetition penalty and n-gram ban, with zh-short, and in a grammar; and one prompt
longer than 512 tokens, past which llama.cpp may use other kernels.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import skydraft
from bench.workload import load_pair, machine, prompts
from skydraft import DecodingParams, Engine, Plan, decoding_params, make_plan
from skydraft.engines.options import EngineOptions

SEED = 7


@dataclass(frozen=True, slots=True)
class Case:
    """One setting, the prompts it is run on, and the plans that must all agree with `cloud`."""

    name: str
    params: DecodingParams
    prompts: list[str]
    plans: tuple[Plan, ...] = (make_plan("lossless", k=5, hand_back="agree:2"), make_plan("lossless"))


def cases(limit: int | None, max_new_tokens: int) -> Iterator[Case]:
    """All settings, at both temperatures."""
    dev, shapes = prompts(limit), ((2, "0"), (5, "agree:2"), (8, "3"))
    more = *(make_plan("lossless", k=k, hand_back=hand_back) for k, hand_back in shapes), make_plan("lossless")
    long_prompt = "请总结下面所有的问题：" + "\n".join(prompts())[:900]
    for temperature in (0.0, 0.8):
        plain = decoding_params(temperature=temperature, seed=SEED, max_new_tokens=max_new_tokens)
        penalties = replace(plain, repetition_penalty=1.1, no_repeat_ngram_size=3)
        style = decoding_params("zh-short", temperature=temperature, seed=SEED, max_new_tokens=max_new_tokens)
        grammar = replace(plain, grammar=skydraft.regex('\\{"答案": "[^"\\\\]{10,60}"\\}'))
        yield Case(f"plain, T={temperature}", plain, dev, more)
        yield Case(f"penalty 1.1 + 3-gram ban, T={temperature}", penalties, dev[:12])
        yield Case(f"zh-short, T={temperature}", style, dev[:12])
        yield Case(f"grammar, T={temperature}", grammar, dev[:12])
        yield Case(f"long prompt, T={temperature}", plain, [long_prompt])


def run(plan: Plan, prompt: str, params: DecodingParams, pair: tuple[Engine, Engine]) -> tuple[int, ...]:
    """The tokens of one generation."""
    edge, cloud = pair
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
        return generation.run().token_ids


def compare(case: Case, pair: tuple[Engine, Engine]) -> tuple[int, int]:
    """(tokens compared, tokens equal): equal counts the common prefix, since what follows a difference says nothing."""
    num_compared = num_equal = 0
    for prompt in case.prompts:
        expected = run(make_plan("cloud"), prompt, case.params, pair)
        for plan in case.plans:
            got = run(plan, prompt, case.params, pair)
            same = next((i for i, (a, b) in enumerate(zip(expected, got)) if a != b), min(len(expected), len(got)))  # noqa: B905
            num_compared += max(len(expected), len(got))
            num_equal += same
            if expected != got:
                how = f"{plan.mode}, k={plan.k}, {plan.hand_back}"
                print(f"  DIFFERENT at token {same}, {how}: {prompt[:40]}", flush=True)
    return num_compared, num_equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=None, help="only the first prompts")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--only", default="", metavar="TEXT", help="only settings whose name holds TEXT")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gpu-layers", type=int, default=0, help="of both models")
    given = parser.parse_args()
    pair = load_pair(EngineOptions(num_threads=given.threads, gpu_layers=given.gpu_layers))
    print(f"{machine()}; invariant_rows {pair[1].invariant_rows}; seed {SEED}")
    total = total_equal = 0
    began = time.perf_counter()
    for case in (case for case in cases(given.limit, given.max_new_tokens) if given.only in case.name):
        num_compared, num_equal = compare(case, pair)
        total, total_equal = total + num_compared, total_equal + num_equal
        print(
            f"{case.name:<36} {len(case.prompts):>3} prompts, {len(case.plans)} plans: "
            f"{num_equal} of {num_compared} equal",
            flush=True,
        )
    minutes = (time.perf_counter() - began) / 60
    share = f"{total_equal} of {total} tokens equal ({total_equal / total:.2%})"
    print(f"lossless == cloud: {share}, {minutes:.1f} min")
    return 0 if total_equal == total else 1
