"""`make demo`: an answer of the real pair and a sentence on what it took, then the same prompt in other modes."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import closing

from rich.table import Table

from skydraft import api
from skydraft.cli.pair_options import load_engine
from skydraft.cli.terminal import TERMINAL, console_for, is_colored, legend, show_tokens
from skydraft.config import DEFAULT_MODE, decoding_params
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.engines.base import Engine
from skydraft.engines.options import EngineOptions
from skydraft.errors import SkydraftError
from skydraft.evaluation.scoring import Scorer
from skydraft.models import default_pair

MODES = {
    "edge": "the small model alone",
    "auto": "about 5 % may differ",
    "quality": "fewer differ",
    "cloud": "the large one alone",
}
PROMPT = "什么是哈希表？它为什么快？"
_HERE = "" if shutil.which("skydraft") else f"{os.path.relpath(sys.prefix)}/bin/"  # where no environment is active
_PARAMS = decoding_params(max_new_tokens=48)


def demo(prompt: str = PROMPT) -> None:
    """Answer `prompt` with the default pair in the default mode, then in the modes of MODES, all of them greedy."""
    console, pair = console_for("auto"), default_pair()
    edge, cloud = (
        load_engine(name, EngineOptions(notify=TERMINAL.say), offline=False) for name in (pair.draft, pair.target)
    )
    console.print(f"\n{pair.draft} writes, {pair.target} corrects it. Here both run on this machine.")
    console.print(f"Question: {prompt}\nAnswer:   ", end="")
    with _answer(prompt, DEFAULT_MODE, edge, cloud) as generation:
        for _, tokens in generation.rounds():
            show_tokens(console, tokens)
    console.print()
    if is_colored(console):
        console.print(legend(generation.origins))
    console.print(verdict(generation, _agreement(generation, edge, cloud)) + "\n")
    console.print(_table(prompt, edge, cloud))
    console.print(
        f"\nTalk to the pair: {_HERE}skydraft chat. For a chat page, and for any app: {_HERE}skydraft gateway"
    )


def _answer(prompt: str, mode: str, edge: Engine, cloud: Engine) -> Generation:
    return api.generate(prompt, edge=edge, cloud=cloud, plan=make_plan(mode), params=_PARAMS)


def verdict(generation: Generation, agreement: float) -> str:
    """What an answer took, in one sentence."""
    stats = generation.stats
    times = f"{stats.num_escalated} time{'' if stats.num_escalated == 1 else 's'}"
    written = round((stats.target_written_per_token or 0) * stats.num_tokens)
    return (
        f"Wrote {stats.num_tokens} tokens. Asked the large model {times}; it wrote {written} of them. "
        f"{agreement:.0%} are what the large model would have written."
    )


def _agreement(generation: Generation, edge: Engine, cloud: Engine) -> float:
    """The share of the tokens that are the target's own choice after the tokens before them."""
    generation.close()  # the scorer needs its place in both models
    with closing(Scorer(edge, cloud, _PARAMS)) as scorer:
        score = scorer.score("demo", generation.prompts, generation.token_ids)
    return sum(map(int.__eq__, score.token_ids, score.choices)) / len(score.token_ids)


def _table(prompt: str, edge: Engine, cloud: Engine) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("mode")
    for name in ("tokens", "asked", "it wrote", "as it would", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for mode, remark in MODES.items():
        with _answer(prompt, mode, edge, cloud) as generation:
            stats = generation.run().stats
            agreement = _agreement(generation, edge, cloud)
        written, asked = f"{stats.target_written_per_token or 0:.0%}", str(stats.num_escalated)
        table.add_row(
            mode, str(stats.num_tokens), asked, written, f"{agreement:.0%}", f"{stats.tokens_per_s:.1f}", remark
        )
    return table


if __name__ == "__main__":
    try:
        demo()
    except SkydraftError as error:
        sys.exit(f"skydraft: {error.line}")
