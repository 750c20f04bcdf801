"""A real llama-server behind a front that counts: money, owners, and texts beside each other."""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, EngineOptions, make_plan
from skydraft.engines.base import Engine
from skydraft.errors import SkydraftError
from skydraft.gateway.pair import Pair
from tests.gateway.running import gateway
from tests.stock.fakes import Fake
from tests.stock.front import Front
from tests.stock.real import llama_server
from tests.stock.test_money import price
from tests.stock.test_owners import KEYS, ask, told

pytestmark = pytest.mark.stock
FATES = ["", "hangs up", "500", "503", "cut 300", "", "cut 0", "429", "hangs up", "", "", "500"]
QUESTIONS = ("用一句话描述海边日落的景色。", "What is a prime number?", "写出五个表情符号。")


@pytest.fixture(scope="module")
def front(gguf_path: Path) -> Iterator[Front]:
    with llama_server(gguf_path, "--kv-unified", slots=4, context=1024) as url, Front(url) as standing:
        yield standing


@pytest.fixture(scope="module")
def edge(home: Path) -> Engine:
    return skydraft.load("qwen2.5-coder-0.5b", EngineOptions(num_threads=1, max_sequences=4))


@pytest.mark.parametrize("most", [None, 4])
def test_no_less_is_told_than_came(front: Front, edge: Engine, most: int | None) -> None:
    front.posts.clear()
    plans = [make_plan("lossless"), make_plan("cloud"), make_plan(gate="entropy:0.5", k=3, hand_back="0")]
    texts, num_refused = [], 0
    with closing(skydraft.connect(front.url, timeout_s=20, price="1,2,3", max_calls=most)) as cloud:
        assert cloud.facts(None) is not None
        front.fates += FATES
        for plan, question in zip(plans, QUESTIONS, strict=True):
            params = DecodingParams(max_new_tokens=32)
            generation = skydraft.generate(question, edge=edge, cloud=cloud, plan=plan, params=params)
            with suppress(SkydraftError):
                generation.run()
            generation.close()
            num_refused += sum(done.record.num_committed for done in generation.rounds_so_far) < 8
            texts.append(generation)
        receipts = [text.receipt for text in texts]
        server: Any = cloud.servers.all[0]
        own, paid = server.wire.ledger.spent, server.budget.cost
    Fake.wait_until(lambda: not front.num_open)
    prompts = [list(text.prompts.target.token_ids) for text in texts]
    calls = [post for post in front.generating if any(post.prompt[: len(ids)] == ids for ids in prompts)]
    told_calls, told_bytes = sum(each.calls for each in receipts), sum(each.bytes_up for each in receipts)
    told_cost, came_bytes = sum(each.cost or 0 for each in receipts), sum(post.num_bytes for post in front.posts)
    print(f"calls: {told_calls} told, {len(calls)} came; bytes: {told_bytes} + {own.bytes_up} told, {came_bytes} came; "
          f"cost: {told_cost:.6f} told, {price(calls):.6f} came; paid {paid:.6f}")  # fmt: skip
    assert told_calls >= len(calls) and (most is None or len(calls) <= most)
    assert told_bytes + own.bytes_up >= came_bytes
    assert told_cost >= price(calls) and paid >= price(front.generating)
    assert told_cost < 2 * price(calls) + 1e-4  # and not much more
    front.fates.clear()


def test_keys_learn_nothing_of_each_other_and_usage_is_of_one_prompt(front: Front, edge: Engine) -> None:
    secret = "The launch code of the blue rocket is 4711 and nobody else may know it. " * 4
    labels = {f"Bearer {key}": name for name, key in KEYS.items()}
    with closing(skydraft.connect(front.url, price="1,10,0")) as cloud:
        with gateway(Pair(edge, cloud), authorize=labels.__getitem__) as running:
            new = told(ask(running, "anna", secret, max_tokens=2))
            other = told(ask(running, "bert", secret, max_tokens=2))
            assert new == other and new[:3] == (0, 0, 0)
        with gateway(Pair(edge, cloud)) as running:
            body: Any = {"max_tokens": 32, "skydraft": {"gate": "entropy:0.3", "k": 2, "hand_back": "0"}}
            answer = ask(running, "anna", secret, model="skydraft-quality", **body)
            usage, stats = answer["usage"], answer["skydraft"]["stats"]
            assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
            assert stats["num_requests"] > 1 and stats["tokens_hit"] > usage["prompt_tokens"]
