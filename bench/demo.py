"""`make demo`: an answer of the real pair and a sentence on what it took, then the same prompt in other modes.

python -m bench demo
"""

import argparse
import os
import shutil
import sys
from collections import defaultdict

from rich.console import Console

from skydraft import api
from skydraft.cli.options.pair import ModelChoice
from skydraft.cli.terminal import TERMINAL, console_for, is_colored, legend, show_tokens
from skydraft.config import decoding_params
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import Plan, make_plan
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.lab.evaluation.scoring import scores

MODES = {
    "edge": "the small model alone",
    "quality": "checked where the small one is unsure",
    "auto": "checked where a calibration says so",
    "lossless": "the default: the large one's text, drafted where that is faster",
    "cloud": "the large one alone",
}
PROMPTS = {"zh": "什么是哈希表？它为什么快？", "en": "What is the difference between TCP and UDP?"}
_LANGUAGE = next(filter(None, map(os.environ.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
_HERE = "" if shutil.which("skydraft") else f"{os.path.relpath(sys.prefix)}/bin/"  # where no environment is active
_PARAMS = decoding_params(max_new_tokens=48)


def demo() -> None:
    """Answer with the default pair, drafting always (`lossless --k 5`), then in the modes of MODES, all of them greedy.
    The question is in Chinese where the terminal is."""
    prompt = PROMPTS["zh" if _LANGUAGE.startswith("zh") else "en"]
    console, models = console_for("auto"), ModelChoice()
    edge, cloud = models.load_pair()
    console.print(f"\n{models.edge_model} writes, {models.target_name} corrects it. Here both run on this machine.")
    console.print(f"Question: {prompt}\nAnswer:   ", end="")
    with _answer(prompt, make_plan("lossless", k=5), edge, cloud) as generation:
        for _, tokens in generation.rounds():
            show_tokens(console, tokens)
    console.print(" … (the demo ends an answer here)" if generation.finish_reason == "length" else "")
    if is_colored(console):
        console.print(legend(generation.origins))
    with TERMINAL.state("Asking the large model what it would have written…"):
        agreement = _agreement(generation, edge, cloud)
    console.print(verdict(generation, agreement) + "\n")
    _show_modes(console, prompt, edge, cloud)
    console.print(
        "\nOne text a mode, in turn: speeds to rely on take more (skydraft compare)."
        f"\nTalk to the pair: {_HERE}skydraft chat. For a chat page, and for any app: {_HERE}skydraft gateway"
    )


def _answer(prompt: str, plan: Plan, edge: Engine, cloud: Engine) -> Generation:
    return api.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=_PARAMS)


def verdict(generation: Generation, agreement: float) -> str:
    stats, calls = generation.stats, generation.stats.num_escalated
    written = round((stats.target_written_per_token or 0) * stats.num_tokens)
    return (
        f"Wrote {stats.num_tokens} tokens. Asked the large model {calls} time{'' if calls == 1 else 's'}; "
        f"it wrote {written} of them. {agreement:.0%} are what the large model would have written."
    )


def _agreement(generation: Generation, edge: Engine, cloud: Engine) -> float:
    """The share of the tokens that are the target's own choice after the tokens before them."""
    generation.close()  # scoring needs its place in both models
    (score,) = scores((edge, cloud), "demo", generation.prompts, _PARAMS, [generation.token_ids])
    return sum(map(int.__eq__, score.token_ids, score.choices)) / len(score.token_ids)


def _show_modes(console: Console, prompt: str, edge: Engine, cloud: Engine) -> None:
    modes_of = defaultdict[str, list[str]](list)  # by text
    console.print(f"{'mode':<9}tokens  asked  it wrote  as it would  tokens/s", style="bold")
    for mode, remark in MODES.items():
        with (
            TERMINAL.state(f"The same question in mode {mode}…"),
            _answer(prompt, make_plan(mode), edge, cloud) as generation,
        ):
            stats = generation.run().stats
            modes_of[" ".join(generation.text.split())].append(mode)
            agreement = _agreement(generation, edge, cloud)
        console.print(
            f"{mode:<9}{stats.num_tokens:>6}{stats.num_escalated:>7}{stats.target_written_per_token or 0:>10.0%}"
            f"{agreement:>13.0%}{stats.tokens_per_s:>10.1f}  {remark}"
        )
    console.print("\nHow their answers begin:")
    for text, modes in modes_of.items():
        console.print(f"  {', '.join(modes)}: {text}"[: console.width - 1], markup=False, highlight=False, no_wrap=True)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        demo()
    except SkydraftError as error:
        sys.exit(f"skydraft: {error.line}")
