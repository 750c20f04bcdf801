"""Would a tail found by lookup lengthen blocks? Replayed on texts of the target, with stated times.

    python -m bench.lookup [--record] [--draft-ms 12] [--feed-ms 12] [--target-ms 45] [--row-ms 1] [--rtt 60]

Where a block is sent anyway, the tokens that followed the same words before, in prompt or text, are put behind it (up
to 8, after the longest match of at least `--match` tokens); and a device without a model would draft so alone. What of
a tail was accepted, the draft model has not read yet: `--feed-ms` a token. Texts are the target's on twelve prompts
that have it copy (bench/data/copy_texts.jsonl, made with --record by the real pair) and those of the committed report.
Simulated: nothing but what both models would say is measured.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import skydraft
from bench.workload import load_pair
from skydraft.config import DecodingParams
from skydraft.decoding.block_length import AutoK, BlockLength
from skydraft.decoding.cost_model import CostModel
from skydraft.decoding.plan import make_plan
from skydraft.evaluation.records import read_records
from skydraft.evaluation.scoring import Scorer
from skydraft.gating.risk import LearnedRisk
from skydraft.prompts.messages import asked
from skydraft.prompts.pair import read_prompt
from skydraft.types import Cost, DraftBlock, LinkCost, Round, Signals, StepRecord

HERE = Path(__file__).parent
COPIES = HERE / "data" / "copy_texts.jsonl"
REPORT = HERE.parent / "docs" / "report-zh-dev" / "records.jsonl"
MAX_TAIL = 8
_NOTE = (
    "张老师：明天上午九点在三号楼二零五教室开教研会，请各位老师带上本学期的教学计划和学生成绩单，"
    "会议大约一个半小时，中午食堂备有工作餐。"
)
_CODE = "def total(prices):\n    total = 0\n    for price in prices:\n        total = total - price\n    return totle"
_LIST = "苹果 三斤 十二元；香蕉 两斤 九元；牛奶 四盒 二十元；鸡蛋 一板 十八元；面包 两个 十四元"
PROMPTS = [
    f"把下面的通知改到下午两点，其余一字不动，直接输出全文：{_NOTE}",
    f"改正下面通知中的错别字，没有就原样输出：{_NOTE}",
    f"把下面通知中的“各位老师”都换成“全体教师”，输出全文：{_NOTE}",
    f"用一句话概括下面的通知：{_NOTE}",
    f"从下面的通知里抄出会议的时间和地点：{_NOTE}",
    f"修正下面代码的两处错误，只输出代码：\n{_CODE}",
    f"给下面的代码加上中文注释，代码不变：\n{_CODE}",
    f"把下面的函数改名为 total_price，其余不变，只输出代码：\n{_CODE}",
    f"把下面的购物清单写成每行一项：{_LIST}",
    f"把下面的购物清单按价格从低到高排列：{_LIST}",
    f"把下面的购物清单转成 JSON 数组，字段为 name、amount、price：{_LIST}",
    f"重复一遍下面的话：{_NOTE}",
]


@dataclass(frozen=True)
class Text:
    """What the target wrote, and what the draft model would have written at each place, and how sure it was."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    drafted: tuple[int, ...]
    signals: tuple[Signals, ...]


def record() -> None:
    """Run the real pair on the prompts that have it copy."""
    params = DecodingParams(max_new_tokens=96)
    edge, cloud = load_pair()
    scorer = Scorer(edge, cloud, params)
    with COPIES.open("w", encoding="utf-8") as file:
        for prompt in PROMPTS:
            done = skydraft.generate(prompt, cloud=cloud, plan=make_plan("cloud"), params=params).run()
            pair = read_prompt(edge, asked(prompt))
            line = scorer.score("", pair, done.token_ids)
            scorer.close()
            signals = [[round(value, 4) for value in found] for found in line.signals]
            row = {
                "prompt": prompt, "prompt_ids": pair.target.token_ids, "token_ids": line.token_ids,
                "drafted": line.drafted, "signals": signals,
            }  # fmt: skip
            print(json.dumps(row, ensure_ascii=False), file=file, flush=True)


def copies() -> list[Text]:
    found = [json.loads(line) for line in COPIES.read_text(encoding="utf-8").splitlines()]
    return [
        Text(
            tuple(each["prompt_ids"]), tuple(each["token_ids"]), tuple(each["drafted"]),
            tuple(Signals(*one) for one in each["signals"]),
        )
        for each in found
    ]  # fmt: skip


def mixed() -> list[Text]:
    """The texts of mode cloud in the committed report; what was asked is not in it, so lookup has the text alone."""
    records = read_records(REPORT)
    alone = {(line.prompt, line.token_ids) for line in records.generations if line.mode == "cloud"}
    return [
        Text((), line.token_ids, line.drafted, tuple(Signals(*found) for found in line.signals))
        for line in records.scores
        if (line.prompt, line.token_ids) in alone
    ]


def lookup(token_ids: Sequence[int], least: int, most: int = MAX_TAIL) -> tuple[int, ...]:
    """What followed the longest earlier occurrence of the last tokens, the latest of equals; `least` must match."""
    best_len, best_end = least - 1, 0
    for end in range(len(token_ids) - 1, 0, -1):
        length = 0
        while length < min(end, most) and token_ids[end - 1 - length] == token_ids[len(token_ids) - 1 - length]:
            length += 1
        if length > best_len:
            best_len, best_end = length, end
    return tuple(token_ids[best_end : best_end + most]) if best_end else ()


@dataclass(frozen=True)
class Times:
    """Milliseconds of a draft step, of reading a token that it did not write, a forward of one row, and so on."""

    draft_ms: float
    feed_ms: float
    target_ms: float
    row_ms: float
    rtt_ms: float

    def round_ms(self, num_drafted: int, num_rows: int) -> float:
        return num_drafted * self.draft_ms + self.rtt_ms + self.target_ms + (num_rows - 1) * self.row_ms

    @property
    def costs(self) -> CostModel:
        forwards = tuple(self.target_ms + self.row_ms * rows for rows in range(32))
        return CostModel(self.draft_ms, forwards, 32, wire_ms=self.rtt_ms)


def replay(text: Text, length: BlockLength | int, times: Times, least: int | None) -> tuple[int, int, float]:
    """(tokens, rounds, ms) of one text. `least` None adds no tail."""
    base, rounds, spent_ms, size = 0, 0, 0.0, len(text.token_ids)
    while base < size:
        num = _num_drafted(text, base, length)
        stands = next((i for i in range(num) if text.drafted[base + i] != text.token_ids[base + i]), num)
        block = [*text.token_ids[base : base + stands], *text.drafted[base + stands : base + num]]
        before = [*text.prompt_ids, *text.token_ids[:base], *block]
        tail = lookup(before, least) if least else ()
        accepted = stands
        if stands == num:  # behind a wrong token nothing is looked at
            following = text.token_ids[base + num :]
            accepted += next((i for i, each in enumerate(tail) if [each] != list(following[i : i + 1])), len(tail))
        committed = min(accepted + 1, size - base)
        spent = times.round_ms(num, num + len(tail) + 1) + times.feed_ms * (accepted - stands if length != 0 else 0)
        if not isinstance(length, int):
            draft_ms, target_ms = num * times.draft_ms, times.target_ms + num * times.row_ms
            costs = Cost(num, num, draft_ms), Cost(1, num + 1, target_ms), LinkCost(spent - draft_ms)
            kept = StepRecord(rounds + 1, base, num, stands, committed, "verified", "", spent, 0.0, *costs)
            length.observe(Round(kept, DraftBlock(base, tuple(block), text.signals[base : base + num]), (), ()))
        base, rounds, spent_ms = base + committed, rounds + 1, spent_ms + spent
    return size, rounds, spent_ms


def _num_drafted(text: Text, base: int, length: BlockLength | int) -> int:
    most = min(length if isinstance(length, int) else length.longest(), len(text.token_ids) - base)
    if isinstance(length, int):
        return most
    ends = (num for num in range(1, most) if length.is_enough(text.signals[base : base + num]))
    return next(ends, most)


def over(texts: Iterable[Text], make: Callable[[], BlockLength | int], times: Times, least: int | None) -> str:
    tokens, rounds, spent_ms = map(sum, zip(*(replay(text, make(), times, least) for text in texts), strict=True))
    return f"{tokens / rounds:>14.2f}{1e3 * tokens / spent_ms:>10.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="make the texts anew, with the real pair")
    parser.add_argument("--draft-ms", type=float, default=12.0)
    parser.add_argument("--feed-ms", type=float, default=12.0)
    parser.add_argument("--target-ms", type=float, default=45.0)
    parser.add_argument("--row-ms", type=float, default=1.0)
    parser.add_argument("--rtt", type=float, default=60.0)
    parser.add_argument("--match", type=int, default=2)
    given = parser.parse_args()
    if given.record:
        record()
    times = Times(given.draft_ms, given.feed_ms, given.target_ms, given.row_ms, given.rtt)
    ways: dict[str, Callable[[], BlockLength | int]] = {
        "k = 5": lambda: 5,
        "risk": lambda: AutoK(times.costs, LearnedRisk(), may_stream=False),
        "lookup alone": lambda: 0,
    }
    print(f"{given}\n{'texts':<12}{'blocks':<14}{'tokens a round':>14}{'tokens/s':>10}   with a tail")
    for name, texts in (("copying", copies()), ("mixed", mixed())):
        for way, make in ways.items():
            print(f"{name:<12}{way:<14}{over(texts, make, times, None)}{over(texts, make, times, given.match)}")


if __name__ == "__main__":
    main()
