"""Classes of characters, Chinese first: the only definition of punctuation, content and control characters.

Width variants belong to one class: `，` and `,` are both comma-like. All functions look at characters of decoded text,
never at token ids (field report F11).
"""

import json
import re
import unicodedata
from contextlib import suppress
from itertools import pairwise
from typing import Any

COMMA_LIKE = frozenset("，,、；;：:﹐﹑﹔﹕､")
FULL_STOP_LIKE = frozenset("。．.！!？?｡﹒﹗﹖")
CLOSING = frozenset("”’」』）)】》〉]}\"'")

# Reduplicated words of everyday Chinese, a list of our own: a character x stands for xx (also at the end of ABB), a
# pair xy for xxyy. Most vocabularies hold more of them.
AA = (
    "慢渐常往刚轻静默缓微淡深浓纷匆茫滔绵悄稍仅恰偏明暗偷紧牢满足连频早久远高长短厚大小细圆红白绿黑甜香暖冷亮多好粼漉"
    "油灿彤晶乎茸漆冰零眯冲洋沉吞喷汪滚荡糟淋腾狠秃蒙滴沙潺哗呼哈嘻嗡皑苍郁葱熙攘团闪摇飘翩徐冉袅依津源爸妈爷奶公婆哥"
    "姐弟妹叔伯舅姑太宝娃人家天年日月夜时处步层阵丝点种样事代星看想走说试等谈问听聊笑堂朗彬吁鼎熊炯叮喳吱轰隆孜兢谆耿"
    "亭脉盈融灼谢寥勃喃侃琅喋叨呜隐低振咄习涓瑟遥浅凉稳悠"
)
AABB = (
    "干净高兴开心快乐漂亮清楚明白认真仔细安静平安健康大方整齐热闹简单实在完整普通辛苦匆忙轻松踏实稳当舒服客气甜蜜红火"
    "老实规矩来往进出上下前后反复日夜断续陆续密麻迷糊模糊犹豫摇晃蹦跳吵闹说笑许多时刻方面真切确实彻底原本轰烈浩荡沸扬"
)

DOUBLED = (re.sub(r"(.)", r"\1\1 ", AA) + re.sub(r"(.)(.)", r"\1\1\2\2 ", AABB)).split()
_DOUBLES = re.compile("|".join(sorted((f"{word}+" for word in DOUBLED), key=len, reverse=True)))
# Ideographs: extension A, unified, compatibility, extensions B to H.
_CJK_RANGES = (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)

# A terminal obeys these characters: foreign text could move the cursor or change earlier output.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_CONTROLS |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # halves of characters: they cannot be encoded
_UNESCAPED_IN_JSON = {code: f"\\u{code:04x}" for code in range(127, 160)}


def is_cjk(char: str) -> bool:
    code = ord(char)
    return any(low <= code <= high for low, high in _CJK_RANGES)


def is_punctuation(char: str) -> bool:
    return unicodedata.category(char).startswith("P")  # symbols such as + are none


def content_units(text: str) -> list[str]:
    """Return the ideographs of a text; if it has none, its words in lower case."""
    return list(filter(is_cjk, text)) or re.findall(r"[^\W_]+", text.lower())


def num_adjacent(text: str) -> int:
    """Count ideographs equal to the character before them, except in the words of DOUBLED. A third equal character
    counts."""
    num_doubles = sum(len(set(match.group())) for match in _DOUBLES.finditer(text))
    return sum(a == b and is_cjk(a) for a, b in pairwise(text)) - num_doubles


def visible(text: str) -> str:
    """Write out control characters, such as \\x1b for an escape; newlines and tabs stay."""
    return text.translate(_CONTROLS)


def one_line(text: str) -> str:
    return visible(" ".join(text.split()))


def json_line(value: object) -> str:
    """Return one line of JSON without control characters; Chinese is not escaped."""
    return json.dumps(value, ensure_ascii=False, default=str).translate(_UNESCAPED_IN_JSON)


def rounded(value: Any, num_digits: int) -> Any:
    if isinstance(value, float):
        return round(value, num_digits)
    if isinstance(value, dict):
        return {key: rounded(inner, num_digits) for key, inner in value.items()}
    return [rounded(inner, num_digits) for inner in value] if isinstance(value, (list, tuple)) else value


def is_whole(*values: Any) -> bool:
    """Whether all texts in these values can be encoded: none has half of a character (U+D800 to U+DFFF)."""
    with suppress(TypeError, ValueError, RecursionError):  # not JSON, or too deep: other checks report it
        return not re.search("[\ud800-\udfff]", json.dumps(values, ensure_ascii=False, default=str))
    return True


def from_json(data: str | bytes) -> Any:
    """Parse JSON, which may begin with a byte order mark. Raises ValueError, also for deep nesting and half
    characters."""
    text = data if isinstance(data, str) else data.decode("utf-8")
    try:
        value = json.loads(text.removeprefix("\ufeff"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\" in text and not is_whole(value):
        raise ValueError("it has half of a character (U+D800 to U+DFFF)")
    return value
