"""A vocabulary: the bytes of each token id. Engines that share a tokenizer have the same vocabulary."""

import codecs
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache, wraps
from itertools import pairwise
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import numpy.typing as npt

from skydraft.characters import COMMA_LIKE, FULL_STOP_LIKE, is_cjk, is_punctuation
from skydraft.errors import OptionError, VocabularyMismatch

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Function = TypeVar("Function", bound=Callable[..., Any])
Rows = npt.NDArray[np.float32]  # an engine's logits, [num_rows, size]


def num_shared(one: TokenIds, other: TokenIds) -> int:
    """Return the length of the beginning that two texts share."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


_ANCHOR = "\n"  # merges with no text after it; without it sentencepiece would put a space before a part
_LOOKS_SPECIAL = re.compile(rb"<(?:\||\xef\xbd\x9c)\S+(?:\||\xef\xbd\x9c)>")  # <|name|>, with DeepSeek's bars too
_MAX_KEPT = 32  # cached results of each function
_MIN_CHINESE_SHARE = 0.01  # Qwen2.5 has 0.17


@dataclass(frozen=True, slots=True)
class TokenClasses:
    """Classes of every token, from its decoded text. All arrays are [vocab.size].

    `content` tokens consist of CJK ideographs (and spaces). A token with a comma-like or full-stop-like character
    anywhere belongs to that class, also merged tokens such as `，我`. `num_cjk` counts ideographs, or incomplete ones
    that start in the token. `lead_cjk` counts ideographs before the first punctuation character, `tail_cjk` after the
    last. `first_char` is the first code point of a content token, else 0. `punct` tokens have punctuation, and
    `ascii_punct` tokens only ASCII punctuation.
    """

    content: Mask
    comma: Mask
    full_stop: Mask
    punct: Mask
    ascii_punct: Mask
    num_cjk: npt.NDArray[np.int16]
    lead_cjk: npt.NDArray[np.int16]
    tail_cjk: npt.NDArray[np.int16]
    first_char: TokenIds


class Vocab:
    """Immutable. `size` is the tokenizer's length; engines drop padding columns beyond it."""

    def __init__(
        self, pieces: Sequence[bytes], encode: Callable[[str], list[int]], *, special_ids: Iterable[int] = (),
        end_ids: Iterable[int] = (), chat_template: str | None = None, tool_template: str | None = None,
        bos_text: str = "", eos_text: str = "",
    ) -> None:  # fmt: skip
        self._names, self._encode, self.size = tuple(pieces), encode, len(pieces)
        self.special_ids = frozenset(special_ids)
        # The bytes that each token adds to a text: none if it is special.
        self.pieces = tuple(b"" if i in self.special_ids else name for i, name in enumerate(self._names))
        self.end_ids = frozenset(end_ids)
        self.chat_template, self.bos_text, self.eos_text = chat_template or tool_template, bos_text, eos_text
        self.tool_template = tool_template  # replaces the chat template if a request has tools

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokenize a text. Names of special tokens in it become special tokens."""
        return tuple(self._encode(text))

    def encode_within(self, text: str) -> tuple[int, ...]:
        """Tokenize a separate part that follows other text."""
        anchor, anchored = self.encode(_ANCHOR), self.encode(_ANCHOR + text)
        return anchored[len(anchor) :] if anchored[: len(anchor)] == anchor else self.encode(text)

    def literal(self, text: str) -> tuple[int, ...]:
        """Tokenize a part of a text, without special tokens whatever it contains."""
        ends = [match.end() for match in self.marks.finditer(text)]
        parts = (text[begin:end] for begin, end in pairwise((0, *ends, len(text))))
        return tuple(token_id for part in parts for token_id in self.encode_within(part))

    def name_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes in a prompt; for a special token its name."""
        return self._names[token_id]

    def written(self, token_ids: Iterable[int]) -> str:
        """Return tokens as text in a prompt, special ones by name; `encode` reads them back."""
        return b"".join(self._names[token_id] for token_id in token_ids).decode(errors="replace")

    def text_bytes(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self.pieces[int(token_id)] for token_id in token_ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens. An incomplete character at the end is left out, a wrong byte becomes U+FFFD."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.text_bytes(token_ids))

    @cached_property
    def marks(self) -> re.Pattern[str]:
        """Matches the first character of each name that `encode` would read as a special token.

        For `<|name|>` it matches the first bar, since a template may write angle brackets around a word of the
        conversation. Tokens that only look special count too: a tokenizer.json does not mark all special ones. Digits
        match any number.
        """
        names = (name for i, name in enumerate(self._names) if i in self.special_ids or _LOOKS_SPECIAL.fullmatch(name))
        rests = defaultdict[str, set[str]](set)
        for name in names:
            text = (name[1:-1] if _LOOKS_SPECIAL.fullmatch(name) else name).decode(errors="ignore")
            if len(text) > 1:  # one character cannot be cut
                rests[re.escape(text[0])].add(re.sub(r"\d+", r"\\d+", re.escape(text[1:])))
        return re.compile("|".join(f"{first}(?={'|'.join(sorted(rests[first]))})" for first in sorted(rests)) or "(?!)")

    @cached_property
    def mark_words(self) -> frozenset[str]:
        """Words that become the name of a special token when put in brackets: `im_end`, `/s`, `s`."""
        names = (self._names[i].decode(errors="ignore") for i in self.special_ids)
        return frozenset(word for name in names for word in (name[1:-1], name.strip("<|｜/>[]")) if word)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits from the bytes of all tokens. Special marks are left out: llama.cpp guesses them by name."""
        digest = hashlib.sha256(str(self.size).encode())
        for piece in self._names:
            digest.update(b" %d " % len(piece) + piece)
        return digest.hexdigest()[:32]

    @cached_property
    def classes(self) -> TokenClasses:
        rows = np.fromiter(map(_class_of, self.pieces), np.dtype((np.int32, len(fields(TokenClasses)))), self.size)
        columns = np.ascontiguousarray(rows.T)
        arrays: list[npt.NDArray[Any]] = [*columns[:5].astype(bool), *columns[5:8].astype(np.int16), columns[8]]
        return TokenClasses(*arrays)


def kept_with_vocab(work: Function) -> Function:
    """Cache the latest results of a function of a vocabulary and other values, for the life of the vocabulary.

    `work` must depend on its arguments alone, and its results must not refer to the vocabulary.
    """
    caches: WeakKeyDictionary[Vocab, Any] = WeakKeyDictionary()

    @wraps(work)
    def kept(vocab: Vocab, *args: Any) -> Any:
        if (cache := caches.get(vocab)) is None:
            its = ref(vocab)  # a strong reference would keep its own key alive
            cache = caches[vocab] = lru_cache(_MAX_KEPT)(lambda *args: work(its(), *args))
        return cache(*args)

    return kept  # type: ignore[return-value]  # the same signature


def check_same(draft: Vocab, target: Vocab) -> None:
    if draft.fingerprint != target.fingerprint:
        raise VocabularyMismatch(
            f"The draft model has a vocabulary of {draft.size} tokens ({draft.fingerprint[:8]}), the target one of "
            f"{target.size} ({target.fingerprint[:8]}): token ids would mean different things.",
            hint="Choose two models of one family, for example qwen2.5-coder-0.5b and qwen2.5-coder-1.5b.",
        )


def check_chinese(vocab: Vocab) -> None:
    """Raise OptionError if the vocabulary has too few Chinese tokens for a zh style."""
    share = float(vocab.classes.content.mean()) if vocab.size else 0.0
    if share < _MIN_CHINESE_SHARE:
        says = f"A zh style needs a Chinese vocabulary; only {share:.2%} of these {vocab.size} tokens are Chinese."
        raise OptionError(says, hint="Leave out --style, or choose another model.")


_CJK_LEAD_BYTES = range(0xE4, 0xEA)  # first bytes of U+4000 to U+9FFF in UTF-8


def _class_of(piece: bytes) -> tuple[int, ...]:
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        num_cjk = sum(byte in _CJK_LEAD_BYTES for byte in piece)
        return (0, 0, 0, 0, 0, num_cjk, num_cjk, num_cjk, 0)
    if text.isascii() and text.isalnum():  # most tokens; a fast path
        return (0,) * 9
    cjk = [is_cjk(char) for char in text]
    marks = [index for index, char in enumerate(text) if is_punctuation(char)]
    if marks:
        found = {text[index] for index in marks}
        counts = sum(cjk), sum(cjk[: marks[0]]), sum(cjk[marks[-1] :])
        return (0, bool(found & COMMA_LIKE), bool(found & FULL_STOP_LIKE), 1, "".join(found).isascii(), *counts, 0)
    is_content = any(cjk) and all(is_c or char.isspace() for is_c, char in zip(cjk, text, strict=True))
    return (is_content, 0, 0, 0, 0, sum(cjk), sum(cjk), sum(cjk), ord(text.lstrip()[0]) if is_content else 0)
