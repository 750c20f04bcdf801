"""The folder of lessons: whole lines or none, bounded, read as a stream; and what is trained with of it. Answers that
become lessons: of a server, side by side, of which the first error and Ctrl-C leave some, and of a target of this
process.
"""

import multiprocessing
import os
import signal
import stat
import threading
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import example, given
from hypothesis import strategies as st

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.errors import NotEnoughDisk, RecordsError
from skydraft.lab.learning import lessons as store_module
from skydraft.lab.learning.answering import Answering
from skydraft.lab.learning.dataset import MIN_GENERATIONS, choose, split, weights_of
from skydraft.lab.learning.lessons import Store, encode
from skydraft.prompts.messages import asked
from tests import toys

from ..evaluation.lines import no_file_beyond
from ..hostile.texts import ALONE, DRAFT, LENGTH, TARGET, TEXT
from ..serving import serving
from ..stock.fakes import HOSTS, fake
from .conftest import filled, lesson, read


def test_what_is_added_is_read_again_in_its_order_by_nobody_else(tmp_path: Path) -> None:
    given = [lesson(n, params={"temperature": 0.5, "stop": ["。"], "logit_bias": [[3, -1.5]]}) for n in range(5)]
    before = os.umask(0)
    store = filled(tmp_path / "new" / "learn", *given)
    os.umask(before)
    assert read(store.folder) == (given, Counter()) and given[0].decoding.stop == ("。",)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in store.folder.glob("*.jsonl")}
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700 and modes == {0o600}


def test_the_oldest_go_when_there_is_too_much(tmp_path: Path) -> None:
    store = Store(tmp_path, 16_000)
    for number in range(200):
        store.add(lesson(number))
    num_files, num_bytes = store.size()
    assert 8_000 < num_bytes <= 16_000 and num_files == 2
    found, skipped = read(tmp_path)
    assert not skipped and [each.prompt_ids[2] for each in found] == list(range(200 - len(found), 200))


def test_two_processes_collect_into_one_folder_and_nothing_is_lost(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(filled, [(tmp_path, *map(lesson, range(n, n + 20))) for n in (0, 20)], chunksize=1)
    found, skipped = read(tmp_path)
    assert not skipped and sorted(each.prompt_ids[2] for each in found) == list(range(40))


def test_a_folder_in_use_is_waited_for_and_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_LOCK_S", 0.1)
    with FileLock(tmp_path / "lessons.lock"), pytest.raises(RecordsError, match="Another process has held"):
        Store(tmp_path).add(lesson())


WHOLE, SKIPPED = encode(lesson())[:-1].decode(), "cut, damaged or of another version"


@pytest.mark.parametrize("poison", [
    b"x" * 99, encode(lesson())[:-9], b"\x00\xff\xfe", b"", *map(str.encode, (
        "[]", "null", "[" * 5000, WHOLE.replace("[3,4,5,6]", "[3,4,5,-6]"),
        WHOLE.replace("[3,4,5,6]", "[3,4,5,4294967296]"), WHOLE.replace("[3,4,5,6]", "[3,4,5]"),
        WHOLE.replace('"acw-"', '"acz-"'), WHOLE.replace('"draft"', '"evil":1,"draft"'), WHOLE.replace("t" * 32, ""),
        *(WHOLE[:-1] + f',"params":{params}}}' for params in (
            '{"temperature":NaN}', '{"nonsense":1}', '{"temperature":-1}', '{"logit_bias":[[1]]}')),
        WHOLE[:-1] + ',"schema":2}',
    )),
])  # fmt: skip
def test_what_is_cut_damaged_or_no_lesson_is_skipped_and_counted(tmp_path: Path, poison: bytes) -> None:
    (tmp_path / "lessons.jsonl").write_bytes(encode(lesson(1)) + poison + b"\n" + encode(lesson(2))[:-1])
    Store(tmp_path).add(lesson(3))  # on a line of its own
    assert read(tmp_path) == ([lesson(1), lesson(2), lesson(3)], Counter({SKIPPED: 1}))


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path: Path) -> None:
    store = filled(tmp_path, lesson(1))
    with no_file_beyond(store.size()[1] + 50), pytest.raises(NotEnoughDisk, match="cannot be kept"):
        store.add(lesson(2))
    assert read(tmp_path) == ([lesson(1)], Counter())


def test_what_is_no_file_of_the_store_is_left_alone(tmp_path: Path) -> None:
    store, outside = filled(tmp_path / "store", lesson(1)), tmp_path / "outside"
    outside.write_bytes(encode(lesson(9)))
    (store.folder / "lessons-backup.jsonl").write_text("a copy")
    (store.folder / "lessons-before.jsonl").symlink_to(outside)
    assert read(store.folder) == ([lesson(1)], Counter()) and store.size() == store.forget()
    assert store.forget() == Store(tmp_path / "none").forget() == (0, 0)
    assert len(list(store.folder.glob("*.jsonl"))) == 2 and outside.read_bytes() == encode(lesson(9))


VOCAB: Any = SimpleNamespace(fingerprint="v" * 32, size=1000)


def test_lessons_of_others_are_left_out_with_a_count_and_too_few_say_how_many_are_missing(tmp_path: Path) -> None:
    good = [lesson(number) for number in range(MIN_GENERATIONS)]
    store = filled(tmp_path, *good[:-1])
    with pytest.raises(RecordsError, match=f"{MIN_GENERATIONS - 1} usable answers, and {MIN_GENERATIONS} are needed"):
        choose(store, VOCAB)
    others = ({"vocab": "x" * 32}, {"target": "x" * 32}, {"token_ids": (3, 4, 5, 1000)}, {"marks": "www-"})
    filled(tmp_path, good[-1], *(lesson(100, **each) for each in others), lesson(1000), lesson(3))
    chosen, left_out = choose(store, VOCAB)
    assert chosen == good and left_out == "1 of another target, 3 of another vocabulary, 2 that say nothing new"


def test_the_newest_are_taken_of_the_target_that_judged_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.lab.learning.dataset.MAX_GENERATIONS", 30)
    mine = [lesson(number, target="m" * 32) for number in range(40)]
    store = filled(tmp_path, *(lesson(number) for number in range(30)), *mine)
    assert choose(store, VOCAB)[0] == mine[10:]
    assert {each.target for each in choose(store, VOCAB, "t" * 32)[0]} == {"t" * 32}


@toys.law(60)
@example([1] * 50)
@example([0] * 17 + list(range(1, 8)))  # one prompt has most of the answers
@given(st.lists(st.integers(0, 40), min_size=MIN_GENERATIONS, max_size=80))
def test_no_prompt_is_on_both_sides_and_nothing_is_lost(prompts: list[int]) -> None:
    lessons = [lesson(prompt, token_ids=(number, 1, 1, 1)) for number, prompt in enumerate(prompts)]
    try:
        trained, held_out = split(lessons)
    except RecordsError:
        assert len(set(prompts)) < 8 or max(Counter(prompts).values()) > len(prompts) / 4
        return
    assert sorted(map(id, trained + held_out)) == sorted(map(id, lessons))
    assert not {each.prompt_ids for each in trained} & {each.prompt_ids for each in held_out}
    assert len(held_out) >= len(lessons) / 6
    assert held_out == [each for each in lessons if each in held_out]
    assert trained == split(lessons[::-1])[0]  # the order in which answers come changes nothing


def test_the_turns_of_a_conversation_are_not_split() -> None:
    """The second one's prompt has the first answer: held out, it would be judged with that in view."""
    firsts = [lesson(number) for number in range(30)]
    after = [each.model_copy(update={"prompt_ids": (*each.prompt_ids, *each.token_ids, 9)}) for each in firsts]
    trained, held_out = split([*after, *firsts][::-1])
    for part in (trained, held_out):
        begun = Counter(each.prompt_ids[:3] for each in part)
        assert begun and set(begun.values()) == {2}


@pytest.mark.parametrize("is_error", [True, False])
def test_an_error_lets_the_answers_under_way_end_and_ctrl_c_does_not(tmp_path: Path, is_error: bool) -> None:
    edge, store = open_toy("toy"), Store(tmp_path)
    length = 100 if is_error else 3000
    given = [DecodingParams(max_new_tokens=length if number < 7 else 1) for number in range(8)]
    asks = [GenerateRequest(asked(f"{number}"), params=params) for number, params in enumerate(given)]

    def on_done(lesson: Any) -> None:
        if is_error:
            raise TimeoutError
        if len(lesson.token_ids) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with ExitStack() as stack:
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it
        stack.callback(signal.signal, signal.SIGINT, handler)
        server = stack.enter_context(serving(open_toy("toy", max_sequences=16), max_sessions=16))
        cloud = stack.enter_context(closing(skydraft.connect(server.address, require=True)))
        answering = Answering(asks, edge, cloud, "weights", store)
        with pytest.raises(TimeoutError if is_error else KeyboardInterrupt):
            answering.run(on_done)
    lengths = [len(lesson.token_ids) for lesson in store.lessons(Counter())]
    # Which of the eight ends first is the machine's affair.
    assert (set(lengths) <= {1, length} and len(lengths) > 1) if is_error else lengths == [1], lengths
    assert len(answering.todo) == 8 - len(lengths)


@pytest.mark.parametrize("host", HOSTS)
def test_a_chat_answers_prompts(host: str, tmp_path: Path) -> None:
    """Its text is learned from in tokens of the draft model."""
    asks = [GenerateRequest(asked(TEXT), params=DecodingParams(max_new_tokens=LENGTH))]
    with fake(host, TARGET) as server, closing(skydraft.connect(server.url, require=True)) as cloud:
        (lesson,) = Answering(asks, DRAFT, cloud, weights_of(cloud), Store(tmp_path)).run(lambda lesson: None)
    assert lesson and lesson.token_ids == ALONE and lesson.target == "name:toy" and set(lesson.marks) == {"t"}


def test_a_target_of_this_process_writes_its_own_texts_and_each_once(tmp_path: Path) -> None:
    edge, target, params = open_toy("toy:drift=0.4"), open_toy("toy"), DecodingParams(max_new_tokens=9)
    prompts, done, plan = ("你好", "我们", "你好"), list[Any](), skydraft.make_plan("cloud")
    asks = [GenerateRequest(asked(prompt), params=params) for prompt in prompts]
    found = Answering(asks, edge, target, "weights", Store(tmp_path)).run(done.append)
    texts = [skydraft.generate(prompt, cloud=target, plan=plan, params=params).run().token_ids for prompt in prompts]
    assert [each and each.token_ids for each in found] == texts
    assert len(done) == 2 and not Answering(asks, edge, target, "weights", Store(tmp_path)).todo


def test_first_tokens_that_belong_to_the_prompt_are_in_it_once(tmp_path: Path) -> None:
    toy, params = open_toy("toy"), DecodingParams(max_new_tokens=3)
    asks = [GenerateRequest(asked("你好"), params=params, begun=(8, 9), begun_is_prompt=True)]
    (found,) = Answering(asks, toy, toy, "weights", Store(tmp_path)).run(lambda lesson: None)
    assert found and found.prompt_ids == (*toy.vocab.encode("你好"), 8, 9)
