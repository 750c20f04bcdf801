"""Hugging Face's own generation with the same pair, plain and assisted, beside ours on the same prompts.

    python -m bench.peers [--prompts 6] [--max-new-tokens 24] [--edge-model MODEL] [--cloud-model MODEL]

Greedy, batch 1, prompt by prompt in turns, each way once before, unmeasured. Checkpoint folders are loaded as they are,
GGUF files dequantised to float32: another arithmetic than llama.cpp's on the packed weights, so speeds across the
engines say nothing and texts may differ at near ties. Ratios are within an engine: of our `lossless` in blocks of 5 to
our `cloud`, and of assisted generation with 5 drafts a round to plain generation.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import skydraft
from bench.workload import machine, prompts
from skydraft.config import DEFAULT_K
from skydraft.engines.base import Engine
from skydraft.engines.checkpoint import load_library, quiet
from skydraft.evaluation.intervals import Resamples
from skydraft.models import default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import prompt_ids

PLANS = {"cloud": skydraft.make_plan("cloud"), "lossless": skydraft.make_plan("lossless", k=DEFAULT_K)}
RATIOS = (("lossless", "cloud"), ("hf-assisted", "hf-target"))
# A way to answer: prompt to generated tokens.
Way = Callable[[str], tuple[int, ...]]


class HuggingFacePair:
    """`generate()` of transformers, plain or assisted by the draft model."""

    def __init__(self, draft: Path, target: Path) -> None:
        self._torch, self._transformers = load_library()
        self._target, self._draft = self._load(target), self._load(draft)

    def _load(self, path: Path) -> Any:
        folder, more = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
        with quiet(self._transformers):
            return self._transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=self._torch.float32, local_files_only=True, **more
            ).eval()

    def generate(
        self, prompt_ids: Sequence[int], end_ids: frozenset[int], max_new_tokens: int, *, assisted: bool
    ) -> tuple[int, ...]:
        """Generated tokens. Assisted: as many drafted tokens a round as our fixed k has, always."""
        inputs = self._torch.tensor([prompt_ids])
        # Read from the assistant's own config; given to `generate` they are ignored.
        config = self._draft.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = DEFAULT_K, "constant"
        config.assistant_confidence_threshold = 0.0
        with self._torch.inference_mode(), quiet(self._transformers):
            output = self._target.generate(
                inputs,
                attention_mask=self._torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(end_ids),
                pad_token_id=min(end_ids),
                repetition_penalty=1.0,
                **({"assistant_model": self._draft} if assisted else {}),
            )
        return tuple(output[0, len(prompt_ids) :].tolist())


def ways(edge: Engine, cloud: Engine, peer: HuggingFacePair, max_new_tokens: int) -> dict[str, Way]:
    """Ours and theirs, by name."""
    params, vocab = skydraft.decoding_params(max_new_tokens=max_new_tokens), cloud.vocab

    def ours(mode: str) -> Way:
        plan = PLANS[mode]
        return lambda prompt: (
            skydraft.generate(prompt, edge=edge, cloud=cloud, plan=plan, params=params).run().token_ids
        )

    def theirs(assisted: bool) -> Way:
        return lambda prompt: peer.generate(
            prompt_ids(vocab, asked(prompt)), vocab.end_ids, max_new_tokens, assisted=assisted
        )

    return {mode: ours(mode) for mode in PLANS} | {"hf-target": theirs(False), "hf-assisted": theirs(True)}


def measure(found: dict[str, Way], dev: Sequence[str]) -> dict[str, tuple[list[tuple[int, ...]], list[float]]]:
    """(tokens, seconds) of each prompt, by way."""
    for way in found.values():
        way(dev[0])
    kept: dict[str, tuple[list[tuple[int, ...]], list[float]]] = {name: ([], []) for name in found}
    for prompt in dev:
        for name, way in found.items():
            began = time.perf_counter()
            kept[name][0].append(way(prompt))
            kept[name][1].append(time.perf_counter() - began)
    return kept


def show(kept: dict[str, tuple[list[tuple[int, ...]], list[float]]]) -> None:
    """Speeds, ratios with their intervals, and how many texts are those of `cloud`."""
    sums = {name: (np.array([*map(len, texts)], float), np.array(spent)) for name, (texts, spent) in kept.items()}
    for name, (tokens, seconds) in sums.items():
        same = sum(mine == theirs for mine, theirs in zip(kept[name][0], kept["cloud"][0], strict=True))
        print(f"{name:<12}{tokens.sum() / seconds.sum():>8.2f} tokens/s, {same} of {len(tokens)} texts as cloud's")
    resamples = Resamples(len(kept["cloud"][0]))
    for name, other in RATIOS:
        value = sums[name][0].sum() / sums[name][1].sum() / (sums[other][0].sum() / sums[other][1].sum())
        low, high = resamples.ratio_of_ratios(sums[name], sums[other]) or (value, value)
        print(f"{name} / {other}: {value:.2f} [{low:.2f}, {high:.2f}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--edge-model", default=default_pair().draft)
    parser.add_argument("--cloud-model", default=default_pair().target)
    given = parser.parse_args()
    with closing(skydraft.load(given.edge_model)) as edge, closing(skydraft.load(given.cloud_model)) as cloud:
        peer = HuggingFacePair(*(engine.path for engine in (edge, cloud)))
        print(machine())
        show(measure(ways(edge, cloud, peer, given.max_new_tokens), prompts(given.prompts)))


if __name__ == "__main__":
    main()
