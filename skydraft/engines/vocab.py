"""A vocabulary: what each token id stands for, and the same for every engine that shares the tokenizer."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from skydraft.characters import COMMA_LIKE, FULL_STOP_LIKE, is_cjk, is_punctuation
from skydraft.errors import OptionError, VocabularyMismatch

TokenIds = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_MIN_CHINESE_SHARE = 0.01  # Qwen2.5 has 0.17


@dataclass(frozen=True, slots=True)
class TokenClasses:
    """Classes of every token, from its decoded text. All arrays are [vocab.size].

    `content` tokens consist of CJK ideographs (and spaces). A token with a comma-like or full-stop-like
    character anywhere belongs to that class, merged tokens such as `，我` too. `num_cjk` counts ideographs,
    or half-finished ones that start in the token; `lead_cjk` those before its first punctuation character and
    `tail_cjk` those after its last. `first_char` is the code point that a content token starts with, else 0.
    `ascii_punct` marks tokens whose punctuation is ASCII alone.
    """

    content: Mask
    comma: Mask
    full_stop: Mask
    other_punct: Mask
    fragment: Mask
    ascii_punct: Mask
    num_cjk: npt.NDArray[np.int16]
    lead_cjk: npt.NDArray[np.int16]
    tail_cjk: npt.NDArray[np.int16]
    first_char: TokenIds

    @property
    def punct(self) -> Mask:
        """Tokens that hold any punctuation."""
        return self.comma | self.full_stop | self.other_punct


class Vocab:
    """Token ids, their bytes, and the way from text to ids. Immutable.

    `size` is the length of the tokenizer: rows beyond it are padding and no engine returns them.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        encode: Callable[[str], list[int]],
        *,
        special_ids: Iterable[int] = (),
        end_ids: Iterable[int] = (),
        chat_template: str | None = None,
        bos_text: str = "",
        eos_text: str = "",
    ) -> None:
        self._names = tuple(pieces)
        self._encode = encode
        self.size = len(self._names)
        self.special_ids = frozenset(special_ids)
        # What each token adds to a text: nothing, if it is special.
        self.pieces = tuple(b"" if i in self.special_ids else name for i, name in enumerate(self._names))
        self.end_ids = frozenset(end_ids)
        self.chat_template = chat_template
        self.bos_text = bos_text
        self.eos_text = eos_text

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`; special tokens written out in it are read as such."""
        return tuple(self._encode(text))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text: none for a special token."""
        return self.pieces[token_id]

    def written(self, token_ids: Iterable[int]) -> str:
        """How tokens are written in a prompt, special ones by their names: `encode` reads them back."""
        return b"".join(self._names[token_id] for token_id in token_ids).decode(errors="replace")

    def text_bytes(self, token_ids: Iterable[int]) -> bytes:
        """The bytes of several tokens, which may end inside a character."""
        return b"".join(self.pieces[int(token_id)] for token_id in token_ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the tokens. An unfinished character at the end is left out, a wrong byte becomes U+FFFD."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.text_bytes(token_ids))

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that are equal exactly when the bytes of all tokens are equal.

        Which tokens are special is left out: llama.cpp calls some so by their looks, a tokenizer.json does not.
        """
        digest = hashlib.sha256(str(self.size).encode())
        for piece in self._names:
            digest.update(b" %d " % len(piece) + piece)
        return digest.hexdigest()[:32]

    @cached_property
    def classes(self) -> TokenClasses:
        """The class of every token; computed once, at the first use."""
        return _classify(self.pieces)


def check_same(draft: Vocab, target: Vocab) -> None:
    """Raise VocabularyMismatch unless both read every token id alike."""
    if draft.fingerprint != target.fingerprint:
        raise VocabularyMismatch(
            f"The draft model has a vocabulary of {draft.size} tokens ({draft.fingerprint[:8]}), the target one of "
            f"{target.size} ({target.fingerprint[:8]}): token ids would mean different things.",
            hint="Choose two models of one family, for example qwen2.5-coder-0.5b and qwen2.5-coder-1.5b.",
        )


def check_chinese(vocab: Vocab) -> None:
    """Raise OptionError when the vocabulary has next to no Chinese tokens, so that a zh style cannot work."""
    share = float(vocab.classes.content.mean()) if vocab.size else 0.0
    if share < _MIN_CHINESE_SHARE:
        raise OptionError(
            f"A zh style needs a Chinese vocabulary; only {share:.2%} of these {vocab.size} tokens are Chinese.",
            hint="Do without --style, or choose another model.",
        )


_CJK_LEAD_BYTES = range(0xE4, 0xEA)  # first bytes of U+4000 to U+9FFF in UTF-8


def _classify(pieces: Sequence[bytes]) -> TokenClasses:
    masks = {name: np.zeros(len(pieces), bool) for name in ("content", "comma", "full_stop", "other", "frag", "ascii")}
    counts = {name: np.zeros(len(pieces), np.int16) for name in ("num", "lead", "tail")}
    first_char = np.zeros(len(pieces), np.int32)
    for token_id, piece in enumerate(pieces):
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            masks["frag"][token_id] = True
            num_cjk = sum(byte in _CJK_LEAD_BYTES for byte in piece)
            counts["num"][token_id] = counts["lead"][token_id] = counts["tail"][token_id] = num_cjk
            continue
        if text.isascii() and text.isalnum():
            continue
        _classify_text(text, token_id, masks, counts, first_char)
    return TokenClasses(
        content=masks["content"],
        comma=masks["comma"],
        full_stop=masks["full_stop"],
        other_punct=masks["other"],
        fragment=masks["frag"],
        ascii_punct=masks["ascii"],
        num_cjk=counts["num"],
        lead_cjk=counts["lead"],
        tail_cjk=counts["tail"],
        first_char=first_char,
    )


def _classify_text(
    text: str, token_id: int, masks: dict[str, Mask], counts: dict[str, npt.NDArray[np.int16]], first_char: TokenIds
) -> None:
    cjk = [is_cjk(char) for char in text]
    marks = [index for index, char in enumerate(text) if is_punctuation(char)]
    counts["num"][token_id] = sum(cjk)
    counts["lead"][token_id] = sum(cjk[: marks[0]]) if marks else sum(cjk)
    counts["tail"][token_id] = sum(cjk[marks[-1] :]) if marks else sum(cjk)
    if marks:
        is_comma = any(text[index] in COMMA_LIKE for index in marks)
        is_stop = any(text[index] in FULL_STOP_LIKE for index in marks)
        masks["comma"][token_id] = is_comma
        masks["full_stop"][token_id] = is_stop
        masks["other"][token_id] = not (is_comma or is_stop)
        masks["ascii"][token_id] = all(text[index].isascii() for index in marks)
    elif any(cjk) and all(is_c or char.isspace() for is_c, char in zip(cjk, text, strict=True)):
        masks["content"][token_id] = True
        first_char[token_id] = ord(text.lstrip()[0])
