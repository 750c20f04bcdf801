"""Many answers side by side: what the first error and Ctrl-C leave of them."""

import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skydraft.config import DecodingParams
from skydraft.decoding.request import GenerateRequest
from skydraft.engines.toy import open_toy
from skydraft.learning.answering import Answering
from skydraft.learning.lessons import Store
from skydraft.prompts.messages import asked


@pytest.mark.parametrize("is_error", [True, False])
def test_an_error_lets_the_answers_under_way_end_and_ctrl_c_does_not(tmp_path: Path, is_error: bool) -> None:
    cloud: Any = open_toy("toy", max_sequences=16)
    store = Store(tmp_path)
    length = 100 if is_error else 3000
    asks = [
        GenerateRequest(asked(f"{number}"), params=DecodingParams(max_new_tokens=length if number < 7 else 1))
        for number in range(8)
    ]
    answering = Answering(asks, cloud, cloud, "weights", store)

    def on_done(lesson: Any) -> None:
        if is_error:
            raise TimeoutError
        if len(lesson.token_ids) == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes of pytest-xdist ignore it
    try:
        with pytest.raises(TimeoutError if is_error else KeyboardInterrupt):
            answering.run(on_done)
    finally:
        signal.signal(signal.SIGINT, handler)
    lengths = [len(lesson.token_ids) for lesson in store.lessons(Counter())]
    if is_error:  # which of the eight ends first is the machine's affair
        assert set(lengths) <= {1, length} and len(lengths) > 1, lengths
    else:
        assert lengths == [1]
    assert len(answering.todo) == 8 - len(lengths)
