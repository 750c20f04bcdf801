"""The longest context: limited by the models' training and the free memory. Nothing is loaded."""

from collections.abc import Sequence as Seq
from pathlib import Path

from skydraft.config import free_bytes
from skydraft.engines.llama.library import kv_facts, load_library
from skydraft.engines.slots import SHORT

ENOUGH = 32_768  # tokens, for coding agents
_SHARE = 0.5  # of the memory that is free after the weights are loaded


def fitting_context(models: Seq[Path], num_sequences: int) -> tuple[int, int, str]:
    """Return (context length, tokens of all texts together, line to show) for these GGUF models: one text may be long
    while the others are short. Raises BrokenModel."""
    facts = [kv_facts(load_library(), path) for path in models]
    trained, token_bytes = min(context for context, _ in facts), sum(num_bytes for _, num_bytes in facts)
    free = free_bytes()
    left = None if free is None or not token_bytes else free - sum(path.stat().st_size for path in models)
    fits = 0 if left is None else int(_SHARE * left / token_bytes)
    others = (num_sequences - 1) * SHORT
    length = min(trained, ENOUGH, max((fits - others) // 256 * 256, SHORT))
    total = min(max(fits, length + others), num_sequences * length)
    why = "as the models were trained" if length == trained else "enough for coding agents"
    why = why if length in (trained, ENOUGH) else "what half of the free memory holds"
    more = "" if length == trained else f"; --context makes it longer, up to {trained}"
    size = f"{length * token_bytes / 1e9:.1f} GB, {total * token_bytes / 1e9:.1f} GB for all conversations"
    return length, total, f"context: {length} tokens, {why} (as a text grows up to {size}){more}."
