"""Speed of the product against what its own forwards allow, on the real pair, in one run.

    python -m bench.speed [--prompts N] [--max-new-tokens N]

Runs are interleaved prompt by prompt, and ratios are medians over prompts: the machine's speed drifts. Prints t_d,
t_v(n), edge and cloud against a bare llama_decode loop, overhead per round, acceptance by position, rounds per token
beside theory, and --k auto against cloud.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable

import skydraft
from bench.baselines import both
from bench.workload import load_pair, machine, prompts
from skydraft import Engine, Generation, decoding_params, make_plan
from skydraft.decoding.cost_model import expected_tokens, measured_alpha
from skydraft.engines.probe import probe

KS = (2, 5, 8)


def run(edge: Engine, cloud: Engine, prompt: str, mode: str, num_tokens: int, k: int | str | None = None) -> Generation:
    """One finished greedy generation."""
    params = decoding_params(max_new_tokens=num_tokens)
    with skydraft.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(mode, k=k), params=params) as generation:
        return generation.run()


def seconds(generation: Generation) -> float:
    """From the start of the generation to its last commit."""
    return generation.records[-1].ended_ms / 1e3


def show_profiles(edge: Engine, cloud: Engine) -> None:
    """Forward times measured now; the remembered ones, which --k auto starts from, may be from another day."""
    for side, engine in (("t_d", edge), ("t_v", cloud)):
        profile = probe(engine)
        times = "  ".join(f"{n}: {ms:.1f}" for n, ms in enumerate(profile.forward_ms, 1))
        print(f"{side}(n) ms, forward of n rows   {times}   invariant_rows {profile.invariant_rows}")


def lossless(edge: Engine, cloud: Engine, dev: list[str], num_tokens: int) -> None:
    print(f"\n{'k':<3}{'overhead ms/round':>19}{'share of wall':>15}{'of own forwards':>17}{'alpha':>8}"
          f"{'rounds/token':>14}{'theory':>8}   acceptance by position")  # fmt: skip
    for k in KS:
        runs = [run(edge, cloud, prompt, "lossless", num_tokens, k) for prompt in dev]
        records = [record for generation in runs for record in generation.records]
        overhead = statistics.median(record.overhead_ms for record in records)
        wall = sum(record.wall_ms for record in records)
        forward = sum(record.draft.forward_ms + record.target.forward_ms for record in records)
        # Blocks cut short by an end or the length limit have no place in the formula.
        whole = [record for record in records if record.num_draft == k and record.num_committed > record.num_accepted]
        by_position = acceptance_by_position([record.num_accepted for record in whole], k)
        alpha = measured_alpha((record.num_accepted, k) for record in whole) or 0.0
        per_token = len(whole) / sum(record.num_committed for record in whole)
        theory = 1 / expected_tokens(alpha, k)
        print(f"{k:<3}{overhead:>19.3f}{1 - forward / wall:>15.2%}{forward / wall:>17.3f}{alpha:>8.3f}"
              f"{per_token:>14.3f}{theory:>8.3f}   {' '.join(f'{share:.2f}' for share in by_position)}")  # fmt: skip


def acceptance_by_position(num_accepted: list[int], k: int) -> list[float]:
    """Share of blocks whose first n drafts were all accepted, n = 1 to k."""
    return [sum(accepted >= n for accepted in num_accepted) / len(num_accepted) for n in range(1, k + 1)]


def against_cloud(edge: Engine, cloud: Engine, dev: list[str], num_tokens: int) -> None:
    variants: dict[str, Callable[[str], Generation]] = {
        "lossless --k auto": lambda prompt: run(edge, cloud, prompt, "lossless", num_tokens, "auto"),
        "lossless --k 2": lambda prompt: run(edge, cloud, prompt, "lossless", num_tokens, 2),
        "lossless --k 5": lambda prompt: run(edge, cloud, prompt, "lossless", num_tokens, 5),
        "edge": lambda prompt: run(edge, cloud, prompt, "edge", num_tokens),
    }
    ratios: dict[str, list[float]] = defaultdict(list)
    cloud_speeds, drafted = [], 0
    for prompt in dev:
        for name, variant in variants.items():
            base, other = run(edge, cloud, prompt, "cloud", num_tokens), variant(prompt)
            base_speed, speed = (len(g.token_ids) / seconds(g) for g in (base, other))
            ratios[name].append(speed / base_speed)
            cloud_speeds.append(base_speed)
            drafted += other.stats.num_draft_tokens if name.endswith("auto") else 0
    print(f"\ncloud alone {statistics.median(cloud_speeds):.1f} tokens/s; speed in units of it, medians over prompts:")
    for name, values in ratios.items():
        print(f"  {name:<20} {statistics.median(values):.3f} (prompts: {min(values):.3f} to {max(values):.3f})")
    print(f"  --k auto drafted {drafted} tokens in {len(dev)} runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    edge, cloud = load_pair()
    dev = prompts()[:: max(1, len(prompts()) // given.prompts)][: given.prompts]
    print(f"{machine()}; {len(dev)} dev prompts, up to {given.max_new_tokens} tokens, greedy, one process")
    run(edge, cloud, dev[0], "lossless", 8, 5)  # warm
    show_profiles(edge, cloud)
    both(edge, cloud, dev, given.max_new_tokens)
    lossless(edge, cloud, dev, given.max_new_tokens)
    against_cloud(edge, cloud, dev, given.max_new_tokens)


if __name__ == "__main__":
    main()
