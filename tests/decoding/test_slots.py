"""The sequences of a model: generations wait for them in order and never for ever, and a conversation takes up what
they hold, token for token as fresh engines would.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

import skydraft
from skydraft import DecodingParams, Generation, make_plan
from skydraft.engines.slots import Slots
from skydraft.engines.toy import ToyEngine, character_vocab, open_toy, random_toy
from skydraft.errors import EngineBusy, EngineError, OptionError, PromptError
from skydraft.prompts.messages import conversation

from ..serving import Serving, serving
from ..toys import Partial

PATIENT_S = 60.0


def few(num: int = 1, wait_s: float = PATIENT_S, spec: str = "toy") -> ToyEngine:
    """A toy with so many sequences, as a llama.cpp model has them."""

    class Few(ToyEngine):
        def allocate(self, num_tokens: int) -> Any:
            assert self.prefixes.num_open < self.max_sequences, "more sequences than there are"
            return super().allocate(num_tokens)

    toy = open_toy(spec, max_sequences=num)
    toy.__class__ = Few
    toy.slots = Slots(spec, num, toy.context_len, wait_s=wait_s)
    return toy


def slots_of(toy: ToyEngine) -> Slots:
    assert toy.slots
    return toy.slots


def is_free(*toys: ToyEngine) -> bool:
    return not any(slots.holders or slots.line for slots in map(slots_of, toys))


def text(num: int = 40, **sides: Any) -> Generation:
    plan = make_plan("edge" if "cloud" not in sides else "cloud" if "edge" not in sides else "lossless")
    return skydraft.generate("你好世界", plan=plan, params=skydraft.decoding_params(max_new_tokens=num), **sides)


def begun(generation: Generation) -> Generation:
    next(iter(generation))
    return generation


VOCAB = character_vocab("我你他说在高兴人大的一，。")


def engine(drift: float = 0.0, max_sequences: int = 2) -> Any:
    made: Any = random_toy(VOCAB, drift=drift)
    made.__class__, made.max_sequences = Partial, max_sequences
    return made


def ask(
    messages: list[dict[str, str]], edge: Any, cloud: Any, mode: str, seed: int, scope: str, temperature: float
) -> Generation:
    params = DecodingParams(max_new_tokens=9, temperature=temperature, seed=seed)
    plan = make_plan(mode, k=5) if mode != "gated" else make_plan(gate="entropy:1.2", k=3)
    sides = {"edge": edge, "cloud": cloud}
    return skydraft.generate(messages=messages, **sides, plan=plan, params=params, cache_scope=scope).run()


def turn(rng: random.Random) -> dict[str, str]:
    return {"role": "user", "content": "".join(rng.choices("我你他说在高兴人大的一，。", k=rng.randint(1, 9)))}


@pytest.fixture(scope="module")
def clouds() -> Iterator[list[Any]]:
    """Two servers of the same target with few seats."""
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(engine(), max_sessions=2)) for _ in range(2)]
        yield [stack.enter_context(closing(skydraft.connect(server.address))) for server in servers]


@pytest.mark.parametrize("num", [1, 2])
def test_as_many_as_come_get_the_text_of_one_whichever_models_they_need_in_which_role(num: int) -> None:
    """Each model drafts for some and checks for others: who took them one by one would wait for ever."""
    one, other = few(num), few(num, spec="toy:drift=0.2")
    roles = [{"edge": one, "cloud": other}, {"edge": other, "cloud": one}, {"cloud": one}, {"edge": other}]
    alone = [text(**{side: open_toy(toy.name) for side, toy in sides.items()}).text for sides in roles]
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: text(**roles[n % 4]).text, range(24)))
    assert done == alone * 6 and is_free(one, other)


def test_they_come_on_in_the_order_of_their_arrival() -> None:
    toy, came = few(), list[int]()
    holder = begun(text(edge=toy))
    with ThreadPoolExecutor(5) as pool:
        for number in range(5):
            pool.submit(lambda n=number: (text(edge=toy).run(), came.append(n)))
            Serving.wait_until(lambda: len(slots_of(toy).line) == number + 1)  # noqa: B023
        holder.close()
    assert came == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("end", ["cancel", "close", "engine"])
def test_a_wait_ends_by_cancelling_by_closing_and_with_the_engine(end: str) -> None:
    toy = few()
    holder, waiting = begun(text(edge=toy)), text(edge=toy)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(lambda: waiting.run().token_ids)
        Serving.wait_until(lambda: bool(slots_of(toy).line))
        {"cancel": waiting.cancel, "close": waiting.close, "engine": toy.close}[end]()
        error = found.exception(PATIENT_S)
    assert str(error) == "The model is closed." if end == "engine" else found.result() == ()
    holder.close()
    assert is_free(toy)


def test_one_that_is_never_closed_is_waited_for_so_long_and_one_that_is_dropped_is_not() -> None:
    toy = few(wait_s=0.05)
    kept = begun(text(edge=toy))
    says = r"in use, and none was free in 0.05 s. .*parallel"
    with ThreadPoolExecutor(1) as pool, pytest.raises(EngineBusy, match=says):
        pool.submit(lambda: text(edge=toy).run()).result()
    del kept
    assert text(edge=toy).text


def test_a_thread_that_would_wait_for_itself_is_told_at_once() -> None:
    toy = few()
    with begun(text(edge=toy)) as kept:
        with pytest.raises(EngineBusy, match="unfinished generation of this thread"):
            text(edge=toy).run()
        assert kept.run().finish_reason == "length"
    assert text(edge=toy).text
    with pytest.raises(EngineError, match=r"needs 2 sequences of toy\. Load it with parallel=2."):
        text(edge=toy, cloud=toy).run()


def test_a_long_text_waits_for_another_and_short_ones_do_not() -> None:
    toy, other = few(3), few(3, spec="toy:drift=0.2")
    for slots in map(slots_of, (toy, other)):
        slots.short_len, slots.num_long = 100, 1  # with the 64 tokens of a round
    alone = text(60, edge=toy, cloud=other).text
    holder = text(60, edge=toy)
    next(token for number, token in enumerate(holder) if number == 50)
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(lambda: text(60, edge=other, cloud=toy).text)
        Serving.wait_until(lambda: bool(slots_of(toy).line))
        assert text(4, edge=toy, cloud=other).text == alone[:4]  # here
        assert len(slots_of(toy).holders) == 2 and not long.done()
        holder.close()
        assert len(long.result(PATIENT_S)) == len(alone)
    with ThreadPoolExecutor(8) as pool:
        sides = [{"edge": toy, "cloud": other}, {"edge": other, "cloud": toy}]
        done = list(pool.map(lambda n: text(60 if n % 3 else 4, **sides[n % 2]).text, range(24)))
    assert done[1::6] == [done[1]] * 4 and done[2::6] == [alone] * 4 and is_free(toy, other)


@pytest.mark.parametrize(("num", "context", "total", "num_long"), [
    (1, 4096, 0, 1), (7, 4096, 0, 7), (7, 32_768, 0, 7), (7, 32_768, 7 * 32_768, 7), (7, 32_768, 100, 1),
    (7, 32_768, 32_768 + 6 * 4096, 1), (7, 32_768, 2 * 32_768 + 5 * 4096, 2), (4, 4097, 4 * 4096 + 3, 3),
])  # fmt: skip
def test_so_many_texts_may_be_long(num: int, context: int, total: int, num_long: int) -> None:
    """All others are short then, and each of them has its room."""
    assert Slots("toy", num, context, total).num_long == num_long


@pytest.mark.parametrize("given", [
    {"wait_s": float("inf")}, {"wait_s": float("nan")}, {"wait_s": -1}, {"wait_s": "3"}, {"parallel": 0},
    {"parallel": 1.5}, {"parallel": "2"}, {"context": 1.5}, {"threads": "all"},
])  # fmt: skip
def test_what_is_no_number_of_places_or_seconds_is_one_clear_error(given: Any) -> None:
    with pytest.raises(OptionError, match="must be"):
        skydraft.load("toy", **given)


@pytest.mark.parametrize("mode", ["lossless", "cloud", "gated", "edge"])
@pytest.mark.parametrize("where", ["here", "served"])
def test_a_conversation_is_its_messages_sent_to_fresh_engines(mode: str, where: str, clouds: list[Any]) -> None:
    """Over 120 conversations in all, several at a time, so that they take each other's places, and change servers."""
    rng = random.Random(f"{mode}{where}")
    num_cached = 0
    edge, here = engine(0.3), engine()
    for _ in range(4):
        talks: list[list[dict[str, str]]] = [[] for _ in range(4)]
        for _ in range(12):
            number = rng.randrange(len(talks))
            talk, seed = talks[number], rng.randrange(99)
            talk.append(turn(rng))
            cloud = here if where == "here" else rng.choice([clouds[0], *clouds])
            temperature = rng.choice([0.0, 0.9])
            got = ask(talk, edge, cloud, mode, seed, f"{number % 3}", temperature)
            fresh = ask(talk, engine(0.3), engine(), mode, seed, "", temperature)
            assert got.token_ids == fresh.token_ids and got.origins == fresh.origins
            num_cached += got.stats.cached_tokens.edge + got.stats.cached_tokens.cloud
            talk.append({"role": "assistant", "content": got.text})
    assert num_cached > 100


def test_one_owners_prompt_is_never_taken_up_by_another(tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("ann a-token-of-24-characters\nbob another-token-of-24-chars\n")
    talk = [turn(random.Random(5)) for _ in range(5)]
    with serving(engine(max_sequences=4), max_sessions=4, token_file=tokens) as server:

        def cached(token: str, scope: str) -> int:
            with closing(skydraft.connect(server.address, token=token)) as cloud:
                return ask(talk, engine(0.3), cloud, "lossless", 0, scope, 0.0).stats.cached_tokens.cloud

        ann, bob = "a-token-of-24-characters", "another-token-of-24-chars"
        assert cached(ann, "chat") == 0 and cached(ann, "chat") > 0
        assert cached(bob, "chat") == 0  # another owner
        assert cached(ann, "other") == 0  # another scope
        assert cached(bob, "chat") > 0


@pytest.mark.parametrize("wrong", [
    *({"role": "user", "content": "我"}, "我", ["我"]),
    *([each] for each in ({"content": "我"}, {"role": "user"}, {"role": "user", "content": 3})),
    *([{"role": role, "content": "我", **more}] for role, more in (("user", {"colour": "red"}), ("narrator", {}))),
    *([{"role": "assistant", "tool_calls": calls}] for calls in ("f", 5, [1], [{}], [{"function": "f"}])),
])  # fmt: skip
def test_what_is_no_conversation_is_refused(wrong: Any) -> None:
    with pytest.raises(PromptError):
        conversation(wrong)
