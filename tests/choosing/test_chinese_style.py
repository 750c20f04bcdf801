"""The Chinese styles: repeats, commas and full stops (F9, F10, F11, F12), with merged tokens and byte fragments."""

import numpy as np
import pytest

from skydraft.choosing.chooser import Chooser
from skydraft.config import DecodingParams, decoding_params
from skydraft.engines.vocab import Vocab
from skydraft.errors import OptionError

from .. import toys
from ..toys import IDS, VOCAB, ids

YUAN = [b"\xe5", b"\x91", b"\x98"]  # 员 in bytes


def shifts(written, **options):
    """What the constraints add to logits of 1 after the prompt and the pieces in `written`, by piece."""
    prefix = toys.array([*toys.PROMPT_IDS, *ids(*written)])
    row = np.ones(VOCAB.size, np.float32)
    edited = Chooser(DecodingParams(**options), VOCAB, len(toys.PROMPT_IDS)).constrain(row, prefix) - row
    return {piece: float(edited[token_id]) for piece, token_id in IDS.items() if edited[token_id]}


COMMAS, STOPS, END = {"，", "、", ",", "，我"}, {"。", "！", "？", "。\n", "？”", ".", ".g"}, {"<eos>"}
GAP, SHIFT = {"comma_gap": 4}, {"full_stop_gap": 8, "full_stop_shift": -8.0}
SIX = ["我们", "在", "说", "高", "兴"]


@pytest.mark.parametrize(
    ("written", "options", "expected"),
    [
        (["员", "，", "在", "员"], {"content_ngram_size": 2}, {"在"}),  # F9: not through punctuation
        (["员", "a", "在", "3", "员"], {"content_ngram_size": 2}, {"在"}),  # nor through what is no content
        (["员", "，", "在", "员"], {"no_adjacent_repeat": True}, {"在", "员"}),
        (["a", *YUAN], {"no_adjacent_repeat": True}, {"员"}),  # a character that was spelled in bytes
        (["，我"], {"no_adjacent_repeat": True}, {"我", "我们"}),  # merged tokens end in a character, too
        # F10: a comma after every second character
        (["我们", "在", "说"], GAP, set()),
        (["我们", "在", "说", "，我"], GAP, COMMAS - {"、"}),  # one character since the comma inside
        (["我", "”", "你", "他", "在"], GAP, COMMAS - {"、"}),  # any punctuation starts the count again
        (["我", "你", "他", *YUAN[:1]], GAP, set()),  # the fourth has begun
        (["我", "3"], GAP, COMMAS - {",", "、"}),  # 3,000
        (["我", "、", "你", "、", "他"], GAP, COMMAS - {"、"}),  # a list
        (["我们", "、", "你", "、", "他"], GAP, set()),  # its end
        ([*SIX, "、"], GAP, COMMAS),
        (["我们", "、"] * 4 + ["你"], GAP, {"、"}),
        ([*SIX, "，", "大"], SHIFT, STOPS | END),
        ([*SIX, "，", "大", "的"], SHIFT, set()),
        ([*SIX, "3", ".", "5", "大", "的"], SHIFT, set()),
        ([*SIX, "大", "的", "。"], SHIFT, STOPS),  # here the text may end
        ([*SIX, "大", "的", "。", "我"], SHIFT, STOPS | END),
        (["我", "，"], SHIFT | {"stop_token_ids": (IDS[b"a"],)}, STOPS | END | {"a"}),
        (["我", "3"], SHIFT, STOPS - {".", ".g"}),  # 3.5
    ],
)
def test_repeats_commas_and_full_stops_are_seen_in_characters(written, options, expected):
    found = shifts(written, **options)
    assert {piece.decode() for piece in found} == expected
    assert set(found.values()) <= {options.get("full_stop_shift", -np.inf)}


WORDS = [*"天气 干净 播报 研究 悄悄 协会会员 会员".split(), *"波光粼湿漉静悄干净高兴今天协会员我的了吃在主播娓，"]
WORD_VOCAB = Vocab([word.encode() for word in WORDS], list)


@pytest.mark.parametrize("words", (
    "波 光 粼>粼  湿 漉>漉  静 悄>悄  干>干净  干 干净>净  高 高 兴>兴  协 会>会员  娓>娓!  主 播>播报-  我 的>的-!  了>了-!"
    "  员 在 员>在-!  员 ， 在 员>在-!  粼 粼>粼-!  干净>净-  娓>娓-  研究>研究-  今 会>会员-  悄>悄悄-  静>静  员>员-!"
).split("  "))  # fmt: skip
def test_f9_a_ban_leaves_words_whole(words):
    """Tokens, and one that may follow; or not (-). The model may be sure of it (!)."""
    written, _, following = words.partition(">")
    token_id = WORDS.index(following.rstrip("-!"))
    row = np.zeros(len(WORDS), np.float32)
    row[token_id] = 12 if "!" in words else 3
    prefix = toys.array([0, *map(WORDS.index, written.split())])
    edited = Chooser(decoding_params("zh-short"), WORD_VOCAB, 1).constrain(row, prefix)
    assert (edited[token_id] == -np.inf) == ("-" in words)


def test_the_content_penalty_falls_on_content_alone():
    """F12: and once."""
    changed = shifts(["员", "员", "，", "a", "3", "，我", "。"], content_penalty=1.25)
    assert changed == {"员".encode(): float(np.float32(0.8) - np.float32(1))}


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


def test_a_style_needs_a_chinese_vocabulary():
    latin = Vocab([bytes([byte]) for byte in range(128)], list)
    with pytest.raises(OptionError, match="Chinese"):
        Chooser(decoding_params("zh-short"), latin, 1)
    Chooser(decoding_params("zh-short"), VOCAB, 1)
