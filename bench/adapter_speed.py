"""What an adapter costs while it is used: merged into the weights, or computed beside them by llama.cpp.

    python -m bench.adapter_speed ADAPTER [--edge-model MODEL] [--tokens 40] [--turns 5] [--threads 0]

The draft model as it came, merged with the adapter as skydraft does it, and with the adapter as a file of llama.cpp's,
each in a loop of its own. After each prompt the same tokens are decoded one by one, in turns that begin with another
one each time; milliseconds a step are medians. What each writes by itself after the prompts is compared too.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

import skydraft
from bench.bare_loop import BareLoop
from bench.workload import machine
from bench.workload import prompts as dev_prompts
from skydraft.config import num_cores
from skydraft.engines.trainable import gguf_name
from skydraft.learning.adapter import Adapter, file_of, merged_with, read_adapter
from skydraft.models import cache_dir, default_pair
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt


def write_for_llama_cpp(adapter: Adapter, path: Path) -> None:
    """The low-rank pairs as llama.cpp reads them: the change is alpha / rank · B · A."""
    from gguf import GGUFWriter

    rank = next(iter(adapter.pairs.values()))[0].shape[0]
    writer = GGUFWriter(path, "qwen2")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", adapter.card.scale * rank)
    for name, (low, high) in adapter.pairs.items():
        writer.add_tensor(f"{gguf_name(name)}.lora_a", low)
        writer.add_tensor(f"{gguf_name(name)}.lora_b", high)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Measure, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--edge-model", default=default_pair().draft)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    adapter = read_adapter(given.adapter)
    with closing(skydraft.load(given.edge_model)) as edge:
        base, threads = file_of(edge), given.threads or num_cores()
        asked_ids = [read_prompt(edge, asked(prompt)).edge.token_ids for prompt in dev_prompts(given.turns)]
    merged = merged_with(adapter, skydraft.load(given.edge_model), cache_dir())
    with tempfile.TemporaryDirectory() as place:
        beside = Path(place) / "adapter.gguf"
        write_for_llama_cpp(adapter, beside)
        loops = {name: BareLoop(path, threads) for name, path in
                 (("as it came", base), ("merged", merged), ("beside", base))}  # fmt: skip
        loops["beside"].adapt(beside)
        spent: dict[str, list[float]] = {name: [] for name in loops}
        texts: dict[str, list[list[int]]] = {name: [] for name in loops}
        for turn, prompt in enumerate(asked_ids):
            names = list(loops)
            for name in names[turn % 3 :] + names[: turn % 3]:
                loop = loops[name]
                spent[name].append(loop.step_ms(prompt, given.tokens))
                texts[name].append(loop.generate(prompt, given.tokens)[0])
        for loop in loops.values():
            loop.close()
    print(f"{machine()}; {adapter.card.base_name}, rank {next(iter(adapter.pairs.values()))[0].shape[0]}, "
          f"{len(adapter.pairs)} matrices, {threads} threads")  # fmt: skip
    for name in spent:
        ratio = statistics.median(a / b for a, b in zip(spent["as it came"], spent[name], strict=True))
        same = sum(a == b for a, b in zip(texts["merged"], texts[name], strict=True))
        print(f"{name:<12}{statistics.median(spent[name]):>8.2f} ms a step, speed {ratio:.2f}, "
              f"texts of the merged one {same} of {len(asked_ids)}")  # fmt: skip


if __name__ == "__main__":
    main()
