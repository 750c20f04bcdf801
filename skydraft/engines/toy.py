"""A language model that is a table: for tests, documentation and `--edge-model toy`.

Logits depend on the last two tokens and the position, all read back from the KV cache. So a cache that was advanced
twice, not rolled back, or at wrong positions gives other logits, as in a real model.
"""

import hashlib
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from skydraft.engines.base import Engine, Feeds, Sequence
from skydraft.engines.row_costs import RowProfile
from skydraft.engines.vocab import Rows, Vocab
from skydraft.errors import EngineError, OptionError

Table: TypeAlias = npt.NDArray[np.float32]

_TOY_CHARACTERS = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能下过子说产种面而方后多定行学法所民得经"
    "十三之进着等部度家电力里如水化高自二理起小物现实加量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形"
    "语速音调情绪声气快慢轻重高低清晰温柔愤怒悲伤平静，。、！？：；"
)
_TOY_LATIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 ,.!?:;'\"()-\n"
_TOY_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] %}<tool_call>\n{{ call['function'] | tojson }}\n</tool_call>{% endfor %}"
    "{% endfor %}"
)


def character_vocab(characters: Iterable[str]) -> Vocab:
    """Return a vocabulary of one token per distinct character, one per byte, so that any text can be encoded, and
    `<eos>` as the last id. Longer words among the characters are tokens, too."""
    distinct = list(dict.fromkeys(characters))
    parts = re.compile("|".join([*(re.escape(word) for word in distinct if len(word) > 1), "(?s:.)"]))
    pieces = [char.encode() for char in distinct] + [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    ids = {char: index for index, char in enumerate(distinct)}
    eos = len(pieces) - 1

    def encode(text: str) -> list[int]:
        token_ids: list[int] = []
        for char in parts.findall(text):
            token_ids += [ids[char]] if char in ids else [len(distinct) + byte for byte in char.encode()]
        return token_ids

    return Vocab(pieces, encode, special_ids=[eos], end_ids=[eos], chat_template=_TOY_TEMPLATE, eos_text="<eos>")


class ListEngine(Engine):
    """An engine in Python: a slot is a list with an entry for each token."""

    has_kernels = False

    def allocate(self, num_tokens: int) -> list[Any]:
        return []

    def roll_back(self, sequence: Sequence, length: int) -> None:
        del sequence.slot[length:]

    def release(self, sequence: Sequence) -> None:
        sequence.slot.clear()

    def kv_length(self, sequence: Sequence) -> int:
        return len(sequence.slot)


class VocabularyOnly(ListEngine):
    """A vocabulary without a model, for a device that drafts by copying."""

    drafts, context_len = False, 1 << 30

    def __init__(self, vocab: Vocab) -> None:
        super().__init__("none")
        self.vocab, self.fingerprint = vocab, "none"

    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        raise EngineError("There is no draft model.")


class ToyEngine(ListEngine):
    """A table model over `vocab`.

    `by_last` and `by_previous` are [vocab.size, vocab.size] logits for the last and the last but one token,
    `by_position` is [period, vocab.size]. A row is their sum. A slot is a list of (token, position), the KV cache.
    """

    can_copy = True
    profile = RowProfile(invariant_rows=64, forward_ms=(0.01,) * 64)

    def __init__(
        self, vocab: Vocab, by_last: Table, *, by_previous: Table | None = None, by_position: Table | None = None,
        context_len: int = 4096, name: str = "toy",
    ) -> None:  # fmt: skip
        super().__init__(name)
        self.vocab, self.context_len, self._by_last = vocab, context_len, by_last
        self._by_previous = np.zeros_like(by_last) if by_previous is None else by_previous
        self._by_position = np.zeros((1, vocab.size), np.float32) if by_position is None else by_position
        tables = (self._by_last, self._by_previous, self._by_position)
        self.fingerprint = hashlib.sha256(b"".join(table.tobytes() for table in tables)).hexdigest()[:32]

    def forward(self, feeds: Feeds, *, want_logits: bool) -> list[Rows]:
        all_rows: list[Rows] = []
        for sequence, token_ids in feeds:
            rows = np.empty((len(token_ids), self.vocab.size), np.float32)
            for index, token_id in enumerate(token_ids):
                sequence.slot.append((int(token_id), len(sequence.slot)))
                rows[index] = self._row(sequence.slot)
            all_rows.append(rows)
        return all_rows

    def _row(self, cache: list[tuple[int, int]]) -> Table:
        last, position = cache[-1]
        previous = cache[-2][0] if len(cache) > 1 else last
        at = position % len(self._by_position)
        row: Table = self._by_last[last] + self._by_previous[previous] + self._by_position[at]
        return row

    def copy(self, source: Sequence, target: Sequence, length: int) -> None:
        target.slot[:] = source.slot[:length]


@lru_cache(maxsize=8)
def _drawn(seed: int, size: int, scale: float) -> list[Table]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, scale, (rows, size)).astype(np.float32) for rows in (size, size, 7)]


def random_toy(
    vocab: Vocab, *, seed: int = 0, drift: float = 0.0, drift_seed: int = 1, scale: float = 3.0,
    context_len: int = 4096, name: str = "toy",
) -> ToyEngine:  # fmt: skip
    """Make a toy with random tables. `drift` mixes in other tables: 0 is the same model, 1 or more a poor drafter."""
    size = vocab.size
    own, other = _drawn(seed, size, scale), _drawn(drift_seed, size, scale)
    last, previous, position = (mine + np.float32(drift) * theirs for mine, theirs in zip(own, other, strict=True))
    # Bare bytes would make broken characters, and an early end would make every test short.
    rare = np.array([len(piece) == 1 and piece[0] >= 0x80 for piece in vocab.pieces])
    last[:, rare | np.isin(np.arange(size), list(vocab.end_ids))] -= 4 * scale
    return ToyEngine(
        vocab, last, by_previous=previous * np.float32(0.5), by_position=position * np.float32(0.3),
        context_len=context_len, name=name,
    )  # fmt: skip


def open_toy(spec: str, context_len: int = 4096, max_sequences: int = 1) -> ToyEngine:
    """Open the packaged toy: `toy`, or `toy:drift=0.4` for a drafter that agrees with it less often."""
    key, _, value = spec.partition(":")[2].partition("=")
    try:
        drift = float(value) if key else 0.0
    except ValueError:
        drift = -1.0
    if key not in ("", "drift") or not 0 <= drift < float("inf"):
        raise OptionError(f"'{spec}' is not a toy model.", hint="Write toy or toy:drift=0.4.")
    vocab = character_vocab((*_TOY_CHARACTERS, *_TOY_LATIN))
    toy = random_toy(vocab, drift=drift, name=spec, context_len=context_len)
    toy.max_sequences = max_sequences
    return toy
