"""`make demo`: one Chinese prompt in every mode on the real pair, then a table of their costs."""

from __future__ import annotations

import sys

from skydraft import api
from skydraft.cli.pair_options import load_engine
from skydraft.cli.terminal import console_for, is_colored, legend, show_tokens, stats_table
from skydraft.config import decoding_params
from skydraft.decoding.plan import make_plan
from skydraft.decoding.stats import Stats
from skydraft.engines.options import EngineOptions
from skydraft.errors import SkydraftError
from skydraft.models import default_pair

# Both models share a processor here: lossless with its own block length would use the target alone, which is faster.
PLANS = {
    "edge": make_plan("edge"), "cloud": make_plan("cloud"), "lossless": make_plan("lossless", k=5),
    "fluency": make_plan("fluency"), "quality": make_plan("quality"),
}  # fmt: skip
PROMPT = "请用一句话描述海边日落的景色。"


def demo(prompt: str = PROMPT) -> None:
    """Run `prompt` in all modes with the default pair, coloured by origin; styles and temperature at their defaults."""
    console, pair = console_for("auto"), default_pair()
    edge, cloud = (load_engine(name, EngineOptions(), offline=False) for name in (pair.draft, pair.target))
    console.print(f"{pair.draft} drafts, {pair.target} checks: both on this machine, greedy; lossless in blocks of 5.")
    console.print(f"{prompt}\n")
    runs: dict[str, Stats] = {}
    for mode, plan in PLANS.items():
        params = decoding_params(max_new_tokens=64)
        with api.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params) as generation:
            console.print(f"{mode:<9} ", end="")
            for _, tokens in generation.rounds():
                show_tokens(console, tokens)
            console.print()
            if is_colored(console):
                console.print(f"{'':<9} ", legend(generation.origins))
            runs[mode] = generation.stats
    console.print()
    console.print(stats_table(runs))
    console.print("\nTalk to the pair: skydraft chat. For a chat page, and for any app: skydraft gateway")


if __name__ == "__main__":
    try:
        demo()
    except SkydraftError as error:
        sys.exit(f"skydraft: {error.line}")
