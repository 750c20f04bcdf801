"""Answers of a server side by side, of which the first error and Ctrl-C leave some, and of a target of this process."""

import signal
import threading
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import skydraft
from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.lab.learning.answering import Answering
from skydraft.lab.learning.dataset import weights_of
from skydraft.lab.learning.lessons import Store
from skydraft.prompts.messages import asked

from ..hostile.texts import ALONE, DRAFT, LENGTH, TARGET, TEXT
from ..serving import serving
from ..stock.fakes import HOSTS, fake


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
