"""Ctrl-C while a GGUF file loads: llama.cpp calls Python meanwhile, where an exception would be lost."""

import ctypes
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skydraft.engines.llama.weights import interrupts_kept, load_model
from skydraft.errors import BrokenModel

LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
NUM_TENSORS = 20


class FakeLibrary:
    """Loads in `NUM_TENSORS` steps, logs each, and asks after each whether to go on. Ctrl-C comes during one step."""

    def __init__(self, interrupted_at: int | None, number: signal.Signals = signal.SIGINT) -> None:
        self.interrupted_at, self.number = interrupted_at, number
        self.log = LOG(lambda level, text, data: None)
        self.num_loaded, self.freed = 0, list[int]()

    def model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def model_load_from_file(self, path: bytes, params: Any) -> int | None:
        for step in range(NUM_TENSORS):
            if step == self.interrupted_at:
                ctypes.CDLL(None)["raise"](self.number)  # seen by Python in whatever of its code runs next
            self.log(1, b"tensor", None)
            self.num_loaded += 1
            if step < NUM_TENSORS - 1 and not params.progress_callback(step / NUM_TENSORS, None):
                return None
        return 4711

    def model_free(self, model: int) -> None:
        self.freed.append(model)


def load(library: FakeLibrary) -> Any:
    return load_model(library, Path("some.gguf"), 0)


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """SIGTERM as a server has it: it ends as by Ctrl-C."""
    before = {each: signal.signal(each, signal.default_int_handler) for each in (signal.SIGINT, signal.SIGTERM)}
    yield
    for each, handler in before.items():
        assert signal.getsignal(each) is signal.default_int_handler
        signal.signal(each, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("step", "freed"), [(0, []), (7, []), (NUM_TENSORS - 1, [4711])])
def test_it_ends_the_loading_and_frees_what_is_loaded(step: int, freed: list[int], number: signal.Signals) -> None:
    library = FakeLibrary(step, number)
    with pytest.raises(KeyboardInterrupt):
        load(library)
    assert step <= library.num_loaded <= step + 1  # the handler may run before the step is counted
    assert library.freed == freed


def test_without_it_or_in_another_thread_nothing_is_changed() -> None:
    library = FakeLibrary(None)
    with ThreadPoolExecutor(1) as pool:
        assert load(library) == pool.submit(load, library).result() == 4711 and library.freed == []
    library.model_load_from_file = lambda path, params: None  # type: ignore[method-assign]
    with pytest.raises(BrokenModel):
        load(library)


def test_a_handler_of_somebody_else_is_left_alone() -> None:
    seen: list[int] = []

    def mine(number: int, frame: object) -> None:
        seen.append(number)

    signal.signal(signal.SIGINT, mine)
    assert load(FakeLibrary(3)) == 4711 and seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_error_in_the_block_does_not_hide_it() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted == [signal.SIGINT]
        raise BrokenModel("cut off")
