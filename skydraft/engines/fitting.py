"""How long a context may be: what models were trained with, and what the free memory holds. Nothing is loaded."""

from collections.abc import Sequence as Seq
from pathlib import Path

from skydraft.config import free_bytes
from skydraft.engines.llama_library import kv_facts, load_library

LEAST, ENOUGH = 4096, 32_768  # tokens: of every program, and for coding agents
_SHARE = 0.5  # of the memory that is free once the weights are there


def fitting_context(models: Seq[Path], num_sequences: int) -> tuple[int, str]:
    """Tokens of context for each of so many sequences in GGUF models, and a line about it. Raises BrokenModel."""
    facts = [kv_facts(load_library(), path) for path in models]
    trained = min(context for context, _ in facts)
    token_bytes = num_sequences * sum(num_bytes for _, num_bytes in facts)
    free = free_bytes()
    left = None if free is None or not token_bytes else free - sum(path.stat().st_size for path in models)
    fits = LEAST if left is None else int(_SHARE * left / token_bytes) // 256 * 256
    length = min(trained, ENOUGH, max(fits, LEAST))
    why = "as the models were trained" if length == trained else "enough for coding agents"
    why = why if length in (trained, ENOUGH) else "what half of the free memory holds"
    more = "" if length == trained else f"; --context makes it longer, up to {trained}"
    line = f"context: {length} tokens, {why} ({length * token_bytes / 1e9:.1f} GB for all conversations){more}."
    return length, line
