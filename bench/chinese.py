"""Chinese tasks with one right answer, made from seeds: word problems, and extraction into a schema.

python -m bench chinese      writes the sets zh-words and zh-extract into skydraft/lab/evaluation/tasks
"""

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import skydraft.lab.tasks as tasks
from skydraft.grammars import json_schema

NUM_ITEMS = 400  # of each kind: half of them dev, half held-out
_SEEDS = (20261, 20262)  # dev, held-out
# Of each pool two are drawn, which differ: {who} and {who2}.
_POOLS = {
    "who": "小明 小红 王老师 李阿姨 张师傅 陈医生 小刚 赵经理 刘奶奶 周同学",
    "thing": "苹果 橙子 铅笔 本子 饼干 口罩 气球 贴纸 灯泡 毛巾",
    "city": "北京 上海 广州 深圳 杭州 成都 武汉 西安 南京 重庆",
    "day": "周一 周二 周三 周四 周五 周六 周日",
    "room": "一号会议室 二号会议室 三楼大厅 图书馆 报告厅",
    "job": "会计 护士 厨师 程序员 司机 翻译 电工 编辑",
    "payer": "收件人 寄件人",
}
Numbers = dict[str, range]

# A text, its numbers, and the answer.
_PROBLEMS: tuple[tuple[str, Numbers, Callable[..., int]], ...] = (
    ("{who}买了{a}份{thing}，每份{b}元，又买了{c}份{thing2}，每份{d}元，付了200元。应该找回多少元？",
     {"a": range(3, 10), "b": range(4, 16), "c": range(2, 7), "d": range(2, 10)},
     lambda a, b, c, d: 200 - a * b - c * d),
    ("仓库里有{a}箱{thing}，每箱{b}个。先运走{c}箱，剩下的平均分给2个小组，每组得到多少个？",
     {"a": range(6, 15), "b": range(6, 25, 2), "c": range(1, 5)}, lambda a, b, c: (a - c) * b // 2),
    ("汽车从{city}开往{city2}，前{a}小时每小时行{b}千米，后{c}小时每小时行{d}千米，这时离{city2}还有{e}千米。全程多少千米？",
     {"a": range(2, 5), "b": range(40, 71), "c": range(2, 6), "d": range(71, 111), "e": range(15, 91)},
     lambda a, b, c, d, e: a * b + c * d + e),
    ("一个孩子今年{a}岁，爸爸的年龄是孩子的{b}倍。{c}年以后，两人的年龄之和是多少岁？",
     {"a": range(4, 13), "b": range(3, 6), "c": range(3, 16)}, lambda a, b, c: a * (b + 1) + 2 * c),
    ("{who}看一本书，前{a}天每天看{b}页，以后每天看{c}页，又用{d}天看完。这本书一共多少页？",
     {"a": range(4, 10), "b": range(12, 31), "c": range(15, 41), "d": range(3, 7)}, lambda a, b, c, d: a * b + c * d),
    ("把一些{thing}分给{a}个人，每人{b}个，还剩{c}个。如果再来{d}个人，每人也要{b}个，还缺多少个？",
     {"a": range(6, 16), "b": range(3, 10), "c": range(1, 6), "d": range(2, 9)}, lambda a, b, c, d: d * b - c),
    ("工厂计划每天做{a}个零件，{b}天做完。做了{c}天以后，每天做的个数是原来的{d}倍，还要多少天做完？",
     {"a": range(20, 99), "b": range(12, 31, 6), "c": range(6, 12, 6), "d": range(2, 4)},
     lambda a, b, c, d: (b - c) // d),
    ("教室里有{a}排座位，每排{b}个，正好坐满。其中女生{c}人，今天有{d}名男生请假，到校的男生有多少人？",
     {"a": range(6, 10), "b": range(5, 9), "c": range(8, 19), "d": range(1, 6)}, lambda a, b, c, d: a * b - c - d),
    ("一件衣服原价{a}元，现在打{b}折。买{c}件，再用一张减{d}元的优惠券，一共要付多少元？",
     {"a": range(40, 210, 10), "b": range(6, 10), "c": range(2, 6), "d": range(5, 26)},
     lambda a, b, c, d: a * b * c // 10 - d),
    ("一块长方形菜地长{a}米，宽{b}米，一条长边靠墙，其余三边围篱笆，篱笆每米{c}元，一共要花多少元？",
     {"a": range(12, 41), "b": range(5, 12), "c": range(3, 13)}, lambda a, b, c: (a + 2 * b) * c),
)  # fmt: skip

# A text, its numbers, and the facts to be found: their names, and what they are in the text.
_NOTES: tuple[tuple[str, Numbers, dict[str, str]], ...] = (
    ("各位好：原定{day}在{room}开的会改到{day2}{a}点，地点换成{room2}，由{who}主持，{who2}记录，预计{b}人参加。",
     {"a": range(9, 19), "b": range(4, 61)},
     {"星期": "day2", "几点": "a", "地点": "room2", "主持人": "who", "人数": "b"}),
    ("{who}在网上看了{thing}和{thing2}，最后只买了{a}份{thing2}，单价{b}元，从{city}寄到{city2}，由{who2}代收。",
     {"a": range(3, 31), "b": range(5, 61)},
     {"买家": "who", "商品": "thing2", "份数": "a", "单价": "b", "收货城市": "city2"}),
    ("我叫{who}，{a}年出生，在{city}做了{b}年{job}，现在想去{city2}找一份{job2}的工作，希望月薪不低于{c}元。",
     {"a": range(1975, 2003), "b": range(1, 21), "c": range(4000, 20500, 500)},
     {"姓名": "who", "出生年份": "a", "现在的职业": "job", "想找的职业": "job2", "月薪": "c"}),
    ("单号{a}的包裹重{b}公斤，从{city}发出，{day}送到{city2}，运费{c}元，{payer}没有付，由{payer2}付。",
     {"a": range(100000, 1000000), "b": range(1, 31), "c": range(8, 91)},
     {"单号": "a", "重量": "b", "出发地": "city", "目的地": "city2", "付款方": "payer2"}),
)  # fmt: skip


Form = tuple[str, Numbers]


def _drawn(forms: Sequence[Form], dev: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Texts of one half by the forms in turn, each with what was drawn for it. Both halves have no text twice."""
    seen: set[str] = set()
    for seed in _SEEDS:
        rng = random.Random(seed)
        for number in range(NUM_ITEMS // 2):
            form, numbers = forms[number % len(forms)]
            text = ""
            while not text or text in seen:
                drawn: dict[str, Any] = {name: rng.choice(of) for name, of in numbers.items()}
                for name, pool in _POOLS.items():
                    drawn[name], drawn[f"{name}2"] = rng.sample(pool.split(), 2)
                text = form.format(**drawn)
            seen.add(text)
            if dev == (seed == _SEEDS[0]):
                yield text, drawn


def word_problems(dev: bool) -> Iterator[dict[str, Any]]:
    for number, (text, drawn) in enumerate(_drawn([form[:2] for form in _PROBLEMS], dev)):
        _, numbers, formula = _PROBLEMS[number % len(_PROBLEMS)]
        yield {
            "id": f"{number:03}",
            "prompt": f"{text}\n请简短地分步计算，最后一行写“答案：”和一个整数。",
            "check": {"kind": "number", "answer": formula(**{name: drawn[name] for name in numbers})},
            "max_new_tokens": 256,
        }


def extractions(dev: bool) -> Iterator[dict[str, Any]]:
    for number, (text, drawn) in enumerate(_drawn([form[:2] for form in _NOTES], dev)):
        answer = {fact: drawn[name] for fact, name in _NOTES[number % len(_NOTES)][2].items()}
        kinds = {fact: "integer" if isinstance(value, int) else "string" for fact, value in answer.items()}
        schema = {
            "type": "object",
            "properties": {fact: {"type": kind} for fact, kind in kinds.items()},
            "required": list(answer),
            "additionalProperties": False,
        }
        yield {
            "id": f"{number:03}",
            "prompt": f"从下面的话里找出{'、'.join(answer)}，用 JSON 回答。\n{text}",
            "grammar": json_schema(schema),
            "check": {"kind": "json", "answer": answer},
            "max_new_tokens": 128,
        }


def written() -> dict[Path, str]:
    """The text of each file, a task a line: the held-out half and the dev half of each set."""
    folder = Path(tasks.__path__[0])
    return {
        folder / f"{name}{end}.jsonl": "".join(json.dumps(task, ensure_ascii=False) + "\n" for task in make(dev))
        for name, make in (("zh-words", word_problems), ("zh-extract", extractions))
        for end, dev in (("", False), ("-dev", True))
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
