"""The baselines of a comparison against the plainest loop there is: `edge` and `cloud` must not be slowed down.

    python -m bench.baselines [--prompts N] [--max-new-tokens N]

Each generation runs as `skydraft compare` runs and times it, next to a bare llama_decode + argmax loop over the same
prompt; ratios are medians over prompts of pairs.
"""

import argparse
import statistics

import skydraft
from bench.bare_loop import BareLoop
from bench.workload import load_pair, machine, prompts
from skydraft import Engine, decoding_params
from skydraft.config import num_cores
from skydraft.evaluation.modes import parse_mode
from skydraft.evaluation.records import PromptEntry
from skydraft.evaluation.runner import Trial, measure
from skydraft.models import cache_dir, default_pair, resolve
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import beginning_ids, prompt_ids

_PAIRS = 3  # of runs, for each prompt


def against_bare(edge: Engine, cloud: Engine, mode: str, model: str, dev: list[str], num_tokens: int) -> None:
    """Print tokens/s of a mode in units of a bare loop over its one model, and whether both write the same."""
    path = resolve(model, cache_dir()).path
    assert path is not None  # a GGUF file
    bare = BareLoop(path, num_cores())
    parsed = parse_mode(mode, lambda style: decoding_params(style, max_new_tokens=num_tokens))
    ratios, num_equal = [], 0
    for prompt in dev:
        trial = Trial(PromptEntry(id="p", prompt=prompt), parsed, 0, None)
        ids = prompt_ids(cloud.vocab, asked(prompt))
        pairs = []
        # Tokens are compared where the prompt is fed in the same parts, times where the bare loop feeds it at once.
        token_ids, _ = bare.generate(ids, num_tokens, len(beginning_ids(cloud.vocab)))
        for _ in range(_PAIRS):
            _, bare_s = bare.generate(ids, num_tokens)
            line = measure(
                trial,
                lambda trial: skydraft.generate(
                    trial.prompt.prompt, edge=edge, cloud=cloud, plan=parsed.plan, params=parsed.params
                ),
            )
            pairs.append(bare_s * 1e3 / line.wall_ms)
        ratios.append(statistics.median(pairs))
        num_equal += list(line.token_ids) == token_ids
    bare.close()
    spread = f"prompts: {min(ratios):.3f} to {max(ratios):.3f}; >= 0.97"
    print(
        f"{mode:<6} / bare loop, tokens/s   {statistics.median(ratios):.3f} ({spread}), "
        f"same tokens on {num_equal} of {len(dev)}"
    )


def both(edge: Engine, cloud: Engine, dev: list[str], num_tokens: int) -> None:
    """Both baselines."""
    against_bare(edge, cloud, "edge", default_pair().draft, dev, num_tokens)
    against_bare(edge, cloud, "cloud", default_pair().target, dev, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    given = parser.parse_args()
    edge, cloud = load_pair()
    dev = prompts()[:: max(1, len(prompts()) // given.prompts)][: given.prompts]
    print(f"{machine()}; {len(dev)} dev prompts, up to {given.max_new_tokens} tokens, greedy")
    both(edge, cloud, dev, given.max_new_tokens)


if __name__ == "__main__":
    main()
