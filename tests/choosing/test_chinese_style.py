"""The Chinese styles: repeats, commas and full stops (F9, F10, F11, F12), with merged tokens and byte fragments."""

import numpy as np
import pytest

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams, decoding_params
from skydraft.engines.vocab import Vocab

from .. import toys
from ..toys import IDS, VOCAB, ids


def shifts(written, **options):
    """What the constraints add to logits of 1 after the prompt and the pieces in `written`, by piece."""
    prefix, row = toys.array([*toys.PROMPT_IDS, *ids(*written)]), np.ones(VOCAB.size, np.float32)
    edited = Chooser(DecodingParams(**options), VOCAB, len(toys.PROMPT_IDS)).constrain(row, prefix) - row
    return {piece.decode(): float(edited[token_id]) for piece, token_id in IDS.items() if edited[token_id]}


COMMAS, STOPS, END = {"，", ",", "，我"}, {"。", "！", "？", "。\n", "？”", ".", ".g"}, {"<eos>"}
NGRAM, ONCE = {"content_ngram_size": 2}, {"no_adjacent_repeat": True}
GAP, SHIFT = {"comma_gap": 4}, {"full_stop_gap": 8, "full_stop_shift": -8.0}


@pytest.mark.parametrize(("written", "options", "expected"), [
    # F9: not through punctuation, nor what is no content; characters in bytes and merged tokens
    ("员 ， 在 员", NGRAM, {"在"}), ("员 a 在 3 员", NGRAM, {"在"}), ("员 ， 在 员", ONCE, {"在", "员"}),
    ("a \udce5 \udc91 \udc98", ONCE, {"员"}), ("，我", ONCE, {"我", "我们"}), ("我们 ，", ONCE, {"我们"}),
    # F10: any punctuation starts the count again, before the character in a token too, and 3,000 has none
    ("我们 在 说", GAP, set()), ("我们 在 说 ，我", GAP, COMMAS), ("我 ” 你 他 在", GAP, COMMAS),
    ("我 你 他 \udce5", GAP, set()), ("我 3", GAP, COMMAS - {","}), ("", GAP, COMMAS | {"、"}),
    # a list, its end, and too much of it
    ("我 、 你 、 他", GAP, COMMAS), ("我们 、 你 、 他", GAP, set()), ("我们 在 说 高 、", GAP, COMMAS | {"、"}),
    ("我们 、 我们 、 我们 、 我们 、 你", GAP, {"、"}), ("我们 、 我们 、 我们 、 你 在", GAP, set()),
    # a full stop counts from the last one, which 3.5 has not, and the end waits within words
    ("我们 在 说 高 兴 ， 大", SHIFT, STOPS | END), ("我们 在 说 高 兴 ， 大 的", SHIFT, set()),
    ("我们 在 说 高 兴 3 . 5 大 的", SHIFT, set()), ("我们 在 说 高 兴 大 的 。", SHIFT, STOPS),
    ("我们 在 说 高 兴 大 的 。 我", SHIFT, STOPS | END), ("我 3", SHIFT, STOPS - {".", ".g"}),
    ("我 ，", SHIFT | {"stop_token_ids": (IDS[b"a"],)}, STOPS | END | {"a"}),
])  # fmt: skip
def test_repeats_commas_and_full_stops_are_seen_in_characters(written, options, expected):
    found = shifts(written.encode(errors="surrogateescape").split(), **options)
    assert found.keys() == expected and set(found.values()) <= {options.get("full_stop_shift", -np.inf)}


WORDS = [*"波光粼湿漉静悄干净高兴今天协会员我的了在主播娓", "天气", "干净", "播报", "悄悄", "会员", "协会会员"]
MAY = "波|光|粼>粼 湿|漉>漉 静|悄>悄 干>干净 干|干净>净 高|高|兴>兴 协|会>会员 娓>娓! 波|光|天|今|我|波|光|天>今!"
NOT = "主|播>播报 我|的>的! 了>了! 员|在|员>在! 波|光|天|今|我|波|光|天>今 粼|粼>粼! 干净>净 娓>娓 悄>悄悄 今|会>会员"
COPY = "波|光|天|今|波|光|天|今|波|光|天>今!"  # eight tokens
CASES = {**dict.fromkeys(MAY.split(), True), **dict.fromkeys([COPY, *NOT.split()], False)}


@pytest.mark.parametrize("case", CASES)
def test_f9_a_ban_leaves_words_whole(case):
    """After > is the next token, of which the model may be sure (!)."""
    written, _, following = case.rstrip("!").partition(">")
    vocab, row = Vocab([word.encode() for word in WORDS], list), np.zeros(len(WORDS), np.float32)
    row[WORDS.index(following)] = 12 if "!" in case else 3
    prefix = toys.array([0, *map(WORDS.index, written.split("|"))])
    edited = Chooser(decoding_params("zh-short"), vocab, 1).constrain(row, prefix)
    assert (edited[WORDS.index(following)] > -np.inf) == CASES[case]


def test_the_content_penalty_falls_on_content_alone():
    """F12: and once."""
    assert shifts("员员，a3。", content_penalty=1.25) == {"员": float(np.float32(0.8) - np.float32(1))}


def test_every_width_of_a_mark_is_that_mark():
    """F11: classes come from characters, so no variant slips through."""
    commas = ("，,、；;：:﹐﹑﹔﹕､", {"comma_gap": 4}, -np.inf)
    stops = ("。．.！!？?｡﹒﹗﹖", {"full_stop_gap": 8}, -7)
    for mark, options, value in [(mark, *rest) for marks, *rest in (commas, stops) for mark in marks]:
        vocab = Vocab(["我".encode(), mark.encode(), f"你{mark}".encode(), f"{mark}\n".encode()], list)
        edited = Chooser(DecodingParams(**options), vocab, 0).constrain(np.ones(4, np.float32), toys.array([0, 1]))
        assert edited.tolist() == [1, value, value, value], mark
