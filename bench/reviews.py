"""A task that nobody here has tuned anything on: hotel reviews in Chinese, which the large model makes up itself.

    python -m bench reviews DIR       writes schema.json, reviews.jsonl (150) and tests.jsonl (the others); can go on

    skydraft learn run reviews --prompts DIR/reviews.jsonl --json-schema DIR/schema.json
    python -m bench learned RUNS --tasks DIR/tests.jsonl --adapter HOME/adapters/MODEL/reviews/adapter.gguf

Each line asks for a review's sentiment, its subject and the words that show it, as JSON. The check is the sentiment
that the large model was told to write with, so a review that came out otherwise counts against every model alike.
"""

import json
import sys
from itertools import product
from pathlib import Path

import skydraft
from bench.learned import OPTIONS, served
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.lab.learning.answering import Answering
from skydraft.lab.learning.dataset import weights_of
from skydraft.lab.learning.lessons import Store
from skydraft.models import default_pair
from skydraft.prompts.messages import asked

GUESTS = ("出差的客人", "带孩子的家庭", "一对情侣", "退休的老人", "学生", "旅行团的客人", "独自旅行的人")
SUBJECTS = ("卫生", "服务", "早餐", "位置", "隔音", "价格", "设施", "床", "网络", "停车")
SENTIMENTS = {"正面": "很满意", "负面": "很不满意", "中性": "觉得一般，有好有坏"}
NUM_TO_LEARN = 150
ASKED = (
    "判断下面的酒店评价，用 JSON 回答：sentiment 是“正面”“负面”或“中性”，subject 是评价主要谈的方面，"
    "words 是原文中表现态度的几个字。\n评价："
)
SCHEMA = {
    "type": "object",
    "properties": {
        "sentiment": {"enum": list(SENTIMENTS)},
        "subject": {"enum": list(SUBJECTS)},
        "words": {"type": "string", "maxLength": 20},
    },
    "required": ["sentiment", "subject", "words"],
    "additionalProperties": False,
}


def main(folder: Path) -> None:
    pair, kinds = default_pair(), list(product(GUESTS, SUBJECTS, SENTIMENTS))
    requests = [
        GenerateRequest(
            asked(f"以{guest}的口气写一条酒店评价，主要谈{subject}，{SENTIMENTS[sentiment]}。只写评价，一两句话。"),
            params=DecodingParams(max_new_tokens=60, sentences=2, temperature=0.8, seed=number),
        )
        for number, (guest, subject, sentiment) in enumerate(kinds)
    ]
    with (
        skydraft.load(pair.draft, OPTIONS) as edge, skydraft.load(pair.target, OPTIONS) as target,
        served(target) as cloud,
    ):  # fmt: skip
        lessons = Answering(requests, edge, cloud, weights_of(cloud), Store(folder / "written")).run(
            lambda lesson: None
        )
        texts = [
            edge.vocab.decode([i for i in each.token_ids if i not in edge.vocab.end_ids]) if each else ""
            for each in lessons
        ]
    tasks = {
        text.strip(): {"kind": "regex", "pattern": r'"sentiment":\s*"(\S+?)"', "answer": sentiment}
        for text, (_, _, sentiment) in zip(texts, kinds, strict=True)
    }
    # Every seventh first, so that any part of the file has all kinds.
    order = sorted(enumerate(tasks.items()), key=lambda each: (each[0] % 7, each[0]))
    lines = [{"id": f"review-{n}", "prompt": ASKED + text, "check": check} for n, (text, check) in order if text]
    grammar = f"json_schema:{json.dumps(SCHEMA, ensure_ascii=False)}"
    for name, some in (
        ("reviews", lines[:NUM_TO_LEARN]), ("tests", [line | {"grammar": grammar} for line in lines[NUM_TO_LEARN:]])
    ):  # fmt: skip
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (folder / "schema.json").write_text(json.dumps(SCHEMA, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
