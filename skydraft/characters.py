"""Classes of characters, Chinese first: the only definition of punctuation, content and control characters.

Width variants belong to one class: `，` and `,` are both comma-like. All functions look at single characters of decoded
text, never at token ids (field report F11).
"""

import json
import re
import unicodedata
from contextlib import suppress
from itertools import groupby
from typing import Any

COMMA_LIKE = frozenset("，,、；;：:﹐﹑﹔﹕､")
FULL_STOP_LIKE = frozenset("。．.！!？?｡﹒﹗﹖")
CLOSING = frozenset("”’」』）)】》〉]}\"'")

# Doubled ideographs that are words or parts of words: 慢慢, 高高兴兴, 谢谢.
REDUPLICATIONS = frozenset(
    char * 2
    for char in "爸宝常层沉处匆大淡滴弟点等短缓哥个公姑刚高乖光滚哈好黑狠红哗欢灰渐姐紧仅静舅久看快空宽款蓝朗姥冷历粼"
    "凉亮聊寥绿妈满漫慢忙茫毛每妹闷密绵明默奶嫩年浓暖偏飘频婆平轻青清星晴区圈悄人日软融洒散闪深生声湿时试"
    "世事叔舒说熟双爽谁丝岁太滔天甜条听通偷团娃弯汪往微巍娓稳问细想香谢写欣行兴熊徐纷炎洋痒样遥爷夜一依盈"
    "悠幽圆源远匀早走字整正真阵蒸种重皱转滋足坐"
)

_CJK_RANGES = (
    (0x3400, 0x4DBF),  # extension A
    (0x4E00, 0x9FFF),  # unified ideographs
    (0xF900, 0xFAFF),  # compatibility ideographs
    (0x20000, 0x323AF),  # extensions B to H
)

# A terminal obeys these characters: text of others could move the cursor, or change earlier output.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # halves of characters: they cannot be encoded
_UNESCAPED_IN_JSON = {code: f"\\u{code:04x}" for code in range(127, 160)}


def is_cjk(char: str) -> bool:
    code = ord(char)
    return any(low <= code <= high for low, high in _CJK_RANGES)


def is_punctuation(char: str) -> bool:
    return unicodedata.category(char).startswith("P")  # symbols such as + are none


def content_units(text: str) -> list[str]:
    """The ideographs of a text. If it has none: its words, in lower case."""
    return list(filter(is_cjk, text)) or re.findall(r"[^\W_]+", text.lower())


def num_adjacent(text: str) -> tuple[int, int]:
    """Number of ideographs equal to the character before them, and of doubles in REDUPLICATIONS, which are not among
    them. A third equal character is no double."""
    runs = ["".join(run) for char, run in groupby(text) if is_cjk(char)]
    num_doubles = sum(run[:2] in REDUPLICATIONS for run in runs)
    return sum(map(len, runs)) - len(runs) - num_doubles, num_doubles


def visible(text: str) -> str:
    """Its control characters are written out, such as \\x1b for an escape; newlines and tabs stay."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def json_line(value: object) -> str:
    """One line of JSON without control characters; Chinese is not escaped."""
    return json.dumps(value, ensure_ascii=False, default=str).translate(_UNESCAPED_IN_JSON)


def rounded(value: Any, num_digits: int) -> Any:
    if isinstance(value, float):
        return round(value, num_digits)
    if isinstance(value, dict):
        return {key: rounded(inner, num_digits) for key, inner in value.items()}
    return [rounded(inner, num_digits) for inner in value] if isinstance(value, (list, tuple)) else value


def is_whole(*values: Any) -> bool:
    """Whether no text in these values has half of a character (U+D800 to U+DFFF): nothing can encode that."""
    with suppress(TypeError, ValueError, RecursionError):  # no JSON, or too deep: others say so
        text = json.dumps(values, ensure_ascii=False, default=str)
        return re.search("[\ud800-\udfff]", text) is None
    return True


def from_json(data: str | bytes) -> Any:
    """The value of a JSON text; it may begin with a byte order mark. Raises ValueError, where it is too deep or has
    half of a character too."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\" in text and not is_whole(value):
        raise ValueError("it has half of a character, which no text has")
    return value
