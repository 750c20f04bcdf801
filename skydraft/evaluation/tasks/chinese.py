"""Chinese tasks with one right answer, made from seeds: word problems, and extraction into a schema."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from skydraft.grammars import json_schema

Draw = tuple[str, Any]  # the text of a task, and its answer

_PEOPLE = ("小明", "小红", "王老师", "李阿姨", "张师傅", "陈医生", "小刚", "赵经理", "刘奶奶", "周同学")
_GOODS = ("苹果", "橙子", "铅笔", "本子", "饼干", "口罩", "气球", "贴纸", "灯泡", "毛巾")
_CITIES = ("北京", "上海", "广州", "深圳", "杭州", "成都", "武汉", "西安", "南京", "重庆")
_DAYS = ("周一", "周二", "周三", "周四", "周五", "周六", "周日")
_ROOMS = ("一号会议室", "二号会议室", "三楼大厅", "图书馆", "报告厅")
_JOBS = ("会计", "护士", "厨师", "程序员", "司机", "翻译", "电工", "编辑")


def _shop(r: random.Random) -> Draw:
    count, price, more, cheaper = r.randint(3, 9), r.randint(4, 15), r.randint(2, 6), r.randint(2, 9)
    paid = -(-(count * price + more * cheaper) // 50) * 50
    who, a, b = r.choice(_PEOPLE), *r.sample(_GOODS, 2)
    text = f"{who}买了{count}份{a}，每份{price}元，又买了{more}份{b}，每份{cheaper}元，付了{paid}元。应该找回多少元？"
    return text, paid - count * price - more * cheaper


def _boxes(r: random.Random) -> Draw:
    boxes, each, gone, people = r.randint(4, 12), r.randint(6, 24), r.randint(2, 20), r.randint(2, 6)
    gone += (boxes * each - gone) % people
    thing = r.choice(_GOODS)
    return (
        f"仓库里有{boxes}箱{thing}，每箱{each}个。先拿走{gone}个，剩下的平均分给{people}个小组，每组得到多少个？",
        (boxes * each - gone) // people,
    )


def _journey(r: random.Random) -> Draw:
    slow, fast, first, then = r.randint(40, 70), r.randint(71, 110), r.randint(2, 4), r.randint(2, 5)
    left = r.randint(15, 90)
    a, b = r.sample(_CITIES, 2)
    return (
        f"一辆汽车从{a}开往{b}，前{first}小时每小时行{slow}千米，后{then}小时每小时行{fast}千米，这时离{b}还有{left}千米。"
        "全程多少千米？",
        slow * first + fast * then + left,
    )


def _ages(r: random.Random) -> Draw:
    child, times, years = r.randint(4, 12), r.randint(3, 5), r.randint(3, 15)
    return (
        f"{r.choice(_PEOPLE)}今年{child}岁，爸爸的年龄是这个孩子的{times}倍。{years}年以后，两人的年龄之和是多少岁？",
        child * (times + 1) + 2 * years,
    )


def _book(r: random.Random) -> Draw:
    each, days, rest = r.randint(12, 30), r.randint(4, 9), r.randint(3, 6)
    later = r.randint(15, 40)
    return (
        f"{r.choice(_PEOPLE)}看一本书，前{days}天每天看{each}页，以后每天看{later}页，又用{rest}天看完。"
        f"这本书一共多少页？",
        each * days + later * rest,
    )


def _share(r: random.Random) -> Draw:
    people, each, more = r.randint(6, 15), r.randint(3, 9), r.randint(1, 5)
    joined = r.randint(2, 8)
    thing = r.choice(_GOODS)
    return (
        f"把一些{thing}分给{people}个人，每人{each}个，还剩{more}个。如果再来{joined}个人，每人也要{each}个，还缺多少个？",
        joined * each - more,
    )


def _factory(r: random.Random) -> Draw:
    plan_days, per_day, faster = r.randint(6, 15), 12 * r.randint(3, 9), r.choice((4, 6))
    while plan_days * per_day % (per_day // 3 * faster):
        plan_days += 1
    per_day_now = per_day // 3 * faster
    return (
        f"工厂计划每天做{per_day}个零件，{plan_days}天做完。实际每天做{per_day_now}个，实际要用多少天做完？",
        plan_days * per_day // per_day_now,
    )


def _school(r: random.Random) -> Draw:
    rows, seats, girls, absent = r.randint(6, 9), r.randint(5, 8), r.randint(8, 18), r.randint(1, 5)
    return (
        f"教室里有{rows}排座位，每排{seats}个，正好坐满。其中女生{girls}人，今天有{absent}名男生请假，到校的男生有多少人？",
        rows * seats - girls - absent,
    )


def _discount(r: random.Random) -> Draw:
    price, count, off, coupon = 10 * r.randint(4, 20), r.randint(2, 5), r.choice((6, 7, 8, 9)), r.randint(5, 25)
    return (
        f"一件衣服原价{price}元，现在打{off}折。买{count}件，再用一张减{coupon}元的优惠券，一共要付多少元？",
        price * off * count // 10 - coupon,
    )


def _garden(r: random.Random) -> Draw:
    length, width, price = r.randint(12, 40), r.randint(5, 11), r.randint(3, 12)
    return (
        f"一块长方形菜地长{length}米，宽{width}米，一条长边靠墙，其余三边围篱笆，篱笆每米{price}元，一共要花多少元？",
        (length + 2 * width) * price,
    )


_PROBLEMS = (_shop, _boxes, _journey, _ages, _book, _share, _factory, _school, _discount, _garden)


def _meeting(r: random.Random) -> Draw:
    old, new = r.sample(_DAYS, 2)
    hour, count = r.randint(9, 18), r.randint(4, 60)
    room, other = r.sample(_ROOMS, 2)
    host = r.choice(_PEOPLE)
    text = f"各位好：原定{old}在{other}开的会改到{new}{hour}点，地点换成{room}，由{host}主持，预计{count}人参加。"
    return text, {"星期": new, "几点": hour, "地点": room, "主持人": host, "人数": count}


def _order(r: random.Random) -> Draw:
    first, second = r.sample(_GOODS, 2)
    count, back, price = r.randint(3, 30), r.randint(1, 2), r.randint(5, 60)
    who, city = r.choice(_PEOPLE), r.choice(_CITIES)
    text = (
        f"{who}在网上看了{first}和{second}，最后只买了{count}份{second}，单价{price}元，寄到{city}。"
        f"第二天又退了{back}份，其余的都收下了。"
    )
    return text, {"收货人": who, "商品": second, "留下的份数": count - back, "单价": price, "城市": city}


def _applicant(r: random.Random) -> Draw:
    now, wish = r.sample(_JOBS, 2)
    born, years, city, pay = r.randint(1975, 2002), r.randint(1, 20), r.choice(_CITIES), 500 * r.randint(8, 40)
    who = r.choice(_PEOPLE)
    text = f"我叫{who}，{born}年出生，在{city}做了{years}年{now}，现在想找一份{wish}的工作，希望月薪不低于{pay}元。"
    return text, {"姓名": who, "出生年份": born, "现在的职业": now, "想找的职业": wish, "月薪": pay}


def _parcel(r: random.Random) -> Draw:
    start, end = r.sample(_CITIES, 2)
    weight, fee, day, number = r.randint(1, 30), r.randint(8, 90), r.choice(_DAYS), r.randint(100000, 999999)
    payer, other = r.sample(("收件人", "寄件人"), 2)
    text = f"单号{number}的包裹重{weight}公斤，从{start}发出，{day}送到{end}，运费{fee}元，{other}没有付，由{payer}付。"
    return text, {"单号": number, "重量": weight, "出发地": start, "目的地": end, "付款方": payer}


_NOTES = (_meeting, _order, _applicant, _parcel)


def _drawn(makers: tuple[Callable[[random.Random], Draw], ...], num: int, seed: int, avoid: set[str]) -> Iterator[Draw]:
    """`num` tasks by the makers in turn, none twice and none in `avoid`, which gets them all."""
    rng = random.Random(seed)
    for number in range(num):
        text, answer = makers[number % len(makers)](rng)
        while text in avoid:
            text, answer = makers[number % len(makers)](rng)
        avoid.add(text)
        yield text, answer


_SEEDS = (20261, 20262)  # dev, held-out
NUM_ITEMS = 400  # half of them dev, half held-out


def _half(makers: tuple[Callable[[random.Random], Draw], ...], dev: bool) -> list[Draw]:
    seen: set[str] = set()
    halves = [list(_drawn(makers, NUM_ITEMS // 2, seed, seen)) for seed in _SEEDS]
    return halves[0 if dev else 1]


def word_problems(dev: bool) -> Iterator[dict[str, Any]]:
    """Word problems with a whole number as the answer, as lines of a task file."""
    for number, (text, answer) in enumerate(_half(_PROBLEMS, dev)):
        yield {
            "id": f"{number:03}",
            "prompt": f"{text}\n请简短地分步计算，最后一行写“答案：”和一个整数。",
            "check": {"kind": "number", "answer": answer},
            "max_new_tokens": 256,
        }


def extractions(dev: bool) -> Iterator[dict[str, Any]]:
    """Notes from which five facts are to be written as JSON that fits a schema, as lines of a task file."""
    for number, (text, answer) in enumerate(_half(_NOTES, dev)):
        schema = {
            "type": "object",
            "properties": {key: _kind_of(value) for key, value in answer.items()},
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


def _kind_of(value: Any) -> dict[str, Any]:
    return {"type": "integer", "maximum": 999999} if isinstance(value, int) else {"type": "string", "maxLength": 12}
