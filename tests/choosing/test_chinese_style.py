"""The Chinese styles: repeats, commas and full stops (F9, F10, F11, F12), with merged tokens and byte fragments."""

import numpy as np
import pytest

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams, decoding_params
from skydraft.engines.vocab import Vocab

from .. import toys
from ..toys import IDS, VOCAB, ids

YUAN = [b"\xe5", b"\x91", b"\x98"]  # 员 in bytes


def shifts(written, **options):
    """What the constraints add to logits of 1 after the prompt and the pieces in `written`, by piece."""
    prefix = toys.array([*toys.PROMPT_IDS, *ids(*written)])
    row = np.ones(VOCAB.size, np.float32)
    edited = Chooser(DecodingParams(**options), VOCAB, len(toys.PROMPT_IDS)).constrain(row, prefix) - row
    return {piece.decode(): float(edited[token_id]) for piece, token_id in IDS.items() if edited[token_id]}


COMMAS, STOPS, END = {"，", ",", "，我"}, {"。", "！", "？", "。\n", "？”", ".", ".g"}, {"<eos>"}
NGRAM, ONCE = {"content_ngram_size": 2}, {"no_adjacent_repeat": True}
GAP, SHIFT = {"comma_gap": 4}, {"full_stop_gap": 8, "full_stop_shift": -8.0}


@pytest.mark.parametrize(
    ("written", "options", "expected"),
    [
        # F9: not through punctuation, nor what is no content; characters in bytes and merged tokens
        ("员 ， 在 员", NGRAM, {"在"}), ("员 a 在 3 员", NGRAM, {"在"}), ("员 ， 在 员", ONCE, {"在", "员"}),
        ("a BYTES", ONCE, {"员"}), ("，我", ONCE, {"我", "我们"}), ("你 我们", ONCE, {"我们"}),
        # F10: any punctuation starts the count again, before the character in a token too, and 3,000 has none
        ("我们 在 说", GAP, set()), ("我们 在 说 ，我", GAP, COMMAS), ("我 ” 你 他 在", GAP, COMMAS),
        ("我 你 他 BYTE", GAP, set()), ("我 3", GAP, COMMAS - {","}), ("", GAP, COMMAS | {"、"}),
        # a list, its end, and too much of it
        ("我 、 你 、 他", GAP, COMMAS), ("我们 、 你 、 他", GAP, set()), ("我们 在 说 高 、", GAP, COMMAS | {"、"}),
        ("我们 、 我们 、 我们 、 我们 、 你", GAP, {"、"}), ("我们 、 我们 、 我们 、 你 在", GAP, set()),
        # a full stop counts from the last one, which 3.5 has not, and the end waits within words
        ("我们 在 说 高 兴 ， 大", SHIFT, STOPS | END), ("我们 在 说 高 兴 ， 大 的", SHIFT, set()),
        ("我们 在 说 高 兴 3 . 5 大 的", SHIFT, set()), ("我们 在 说 高 兴 大 的 。", SHIFT, STOPS),
        ("我们 在 说 高 兴 大 的 。 我", SHIFT, STOPS | END), ("我 3", SHIFT, STOPS - {".", ".g"}),
        ("我 ，", SHIFT | {"stop_token_ids": (IDS[b"a"],)}, STOPS | END | {"a"}),
    ],
)  # fmt: skip
def test_repeats_commas_and_full_stops_are_seen_in_characters(written, options, expected):
    pieces = written.replace("BYTES", "0 1 2").replace("BYTE", "0").split()
    found = shifts([YUAN[int(piece)] if piece in "012" else piece for piece in pieces], **options)
    assert found.keys() == expected
    assert set(found.values()) <= {options.get("full_stop_shift", -np.inf)}


WORDS = [*("天气", "干净", "播报", "研究", "悄悄", "会员"), *"波光粼湿漉静悄干净高兴今天协会员我的了吃在主播娓，协"]
WORD_VOCAB = Vocab([word.encode() for word in [*WORDS, "协会会员"]], list)
MAY = "波光粼>粼 湿漉>漉 静悄>悄 干>干净 干,干净>净 高高兴>兴 协会>会员 娓>娓!"
MAY_NOT = "主播>播报 我的>的! 了>了! 员在员>在! 员，在员>在! 粼粼>粼! 干净>净 娓>娓 研究>研究 今会>会员 悄>悄悄 员>员!"


@pytest.mark.parametrize(("words", "may"), [*((x, True) for x in MAY.split()), *((x, False) for x in MAY_NOT.split())])
def test_f9_a_ban_leaves_words_whole(words, may):
    """After > is the next token, of which the model may be sure (!). Tokens before it are characters, or as , says."""
    written, _, following = words.rstrip("!").partition(">")
    token_id = WORDS.index(following)
    row = np.zeros(WORD_VOCAB.size, np.float32)
    row[token_id] = 12 if "!" in words else 3
    pieces = written.split(",") if "," in written else [written] if written in WORDS else written
    prefix = toys.array([0, *map(WORDS.index, pieces)])
    edited = Chooser(decoding_params("zh-short"), WORD_VOCAB, 1).constrain(row, prefix)
    assert (edited[token_id] > -np.inf) == may


def test_the_content_penalty_falls_on_content_alone():
    """F12: and once."""
    changed = shifts(["员", "员", "，", "a", "3", "，我", "。"], content_penalty=1.25)
    assert changed == {"员": float(np.float32(0.8) - np.float32(1))}


@pytest.mark.parametrize(
    ("marks", "options", "value"),
    [("，,、；;：:﹐﹑﹔﹕､", {"comma_gap": 4}, -np.inf), ("。．.！!？?｡﹒﹗﹖", {"full_stop_gap": 8}, -7)],
)
def test_every_width_of_a_mark_is_that_mark(marks, options, value):
    """F11: classes come from characters, so no variant slips through."""
    for mark in marks:
        vocab = Vocab(["我".encode(), mark.encode(), f"你{mark}".encode(), f"{mark}\n".encode()], list)
        edited = Chooser(DecodingParams(**options), vocab, 0).constrain(np.ones(4, np.float32), toys.array([0, 1]))
        assert edited.tolist() == [1, value, value, value], mark
