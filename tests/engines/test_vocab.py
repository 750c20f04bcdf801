"""Vocabularies: bytes, classes from characters (F11), fingerprints, and which pairs may work together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skydraft.engines.vocab import Vocab, check_chinese, check_same
from skydraft.errors import OptionError, VocabularyMismatch
from tests.toys import law


def vocab_of(*pieces: str | bytes, special_ids=()) -> Vocab:
    raw = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return Vocab(raw, list, special_ids=special_ids)


# Of each class, or of none: its pieces, with (CJK characters, before the first mark, after the last mark).
ZERO, ONE = (0, 0, 0), (1, 1, 1)
BY_CLASS: list[tuple[str, tuple[int, int, int], list[str | bytes]]] = [
    ("content", ONE, ["我", " 在", "在 ", "𠀀", "㐀"]),
    ("content", (2, 2, 2), ["我们"]),
    ("", ONE, ["我a", "我3", b"\xe5", b"\xe5\x91", b"\x98\xe5"]),
    ("", ZERO, ["abc", "3", "é", "+", " ", "\n", "", "の", b"\x98", b"\xef\xbc"]),  # the last begins a wide comma
    ("punct comma", ZERO, ["，", "、", "；", "："]),
    ("punct comma", (3, 2, 1), ["你们，我"]),
    ("punct comma ascii_punct", ZERO, [","]),
    ("punct full_stop", ZERO, ["。", "。\n\n", "！"]),
    ("punct full_stop ascii_punct", ZERO, [".", ".com", "?!"]),
    ("punct comma full_stop", (4, 1, 2), ["我，你。他们"]),
    ("punct comma full_stop", ZERO, ["，。", "，."]),
    ("punct", ZERO, ["”"]),
    ("punct", (1, 0, 1), ["（笑"]),
    ("punct ascii_punct", ZERO, ["-"]),
]
CLASSES = {piece: (names, *counts) for names, counts, pieces in BY_CLASS for piece in pieces}
MASKS = ("content", "comma", "full_stop", "punct", "ascii_punct")


@pytest.mark.parametrize("piece", CLASSES, ids=repr)
def test_classes(piece):
    classes = vocab_of(piece).classes
    names, *counts = CLASSES[piece]
    assert {name for name in MASKS if getattr(classes, name)[0]} == set(names.split())
    assert [int(getattr(classes, name)[0]) for name in ("num_cjk", "lead_cjk", "tail_cjk")] == counts
    expected = ord(piece.strip()[0]) if names == "content" else 0
    assert classes.first_char[0] == expected


def test_special_tokens_have_no_class():
    assert vocab_of("a", "我，", "我，", special_ids=[1]).classes.comma.tolist() == [False, False, True]


@law(150)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_a_fingerprint_changes_with_any_byte_order_or_border(pieces, data):
    vocab = vocab_of(*pieces)
    assert vocab.fingerprint == vocab_of(*pieces).fingerprint
    assert len(vocab.fingerprint) == 32 and int(vocab.fingerprint, 16) >= 0
    assert vocab_of("a", " 1 b").fingerprint != vocab_of("a 1 ", "b").fingerprint
    at = data.draw(st.integers(0, len(pieces) - 1))
    before, after = pieces[:at], pieces[at + 1 :]
    same_bytes = [b"".join(pieces)] + [b""] * (len(pieces) - 1)
    for other in ([*before, pieces[at] + b"x", *after], [*pieces, b""], before + after, pieces[::-1], same_bytes):
        assert (vocab_of(*other).fingerprint == vocab.fingerprint) == (other == pieces)


def test_a_pair_must_read_every_id_alike():
    check_same(vocab_of("a", "b", special_ids=[1]), vocab_of("a", "b"))
    for other in (vocab_of("a"), vocab_of("b", "a"), vocab_of("a", "b", "")):
        with pytest.raises(VocabularyMismatch, match="2 tokens"):
            check_same(vocab_of("a", "b"), other)


@pytest.mark.parametrize(("pieces", "text"), [
    (["我", "们"], "我们"),
    ([b"\xe5", b"\x91", b"\x98"], "员"),
    ([b"\xe5", b"\x91"], ""),  # half a character at the end is left out
    ([b"\x91", "a"], "\ufffda"),  # a wrong byte in between is shown as such
    ([b"\xe5", "a"], "\ufffda"),
    ([b"\xf0\xa0", b"\x80\x80"], "𠀀"),
    ([], ""),
])  # fmt: skip
def test_decoding(pieces, text):
    assert vocab_of(*pieces).decode(range(len(pieces))) == text


def test_a_chinese_vocabulary_has_chinese_tokens():
    check_chinese(vocab_of("我", *["a"] * 99))
    for poor in (vocab_of("我", *["a"] * 101), vocab_of("，", "。"), vocab_of()):
        with pytest.raises(OptionError, match="Chinese"):
            check_chinese(poor)
