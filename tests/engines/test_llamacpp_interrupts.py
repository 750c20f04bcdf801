"""Ctrl-C while a GGUF file loads: llama.cpp calls Python meanwhile, where an exception would be lost."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skydraft.engines.llamacpp import LlamaCppEngine, interrupts_kept, patiently
from skydraft.engines.options import EngineOptions
from skydraft.errors import BrokenModel, EngineError

LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
NUM_TENSORS = 20


class FakeLibrary:
    """Loads in `NUM_TENSORS` steps, logs each, and asks after each whether to go on. Ctrl-C comes during one step."""

    def __init__(self, interrupted_at: int | None) -> None:
        self.interrupted_at = interrupted_at
        self.log = LOG(lambda level, text, data: None)
        self.num_loaded, self.freed, self.step_s = 0, [], 0.0

    def model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(n_gpu_layers=0, progress_callback=None)

    def model_load_from_file(self, path: bytes, params: Any) -> int | None:
        for step in range(NUM_TENSORS):
            if step == self.interrupted_at:
                ctypes.CDLL(None)["raise"](signal.SIGINT)  # seen by Python in whatever of its code runs next
            self.log(1, b"tensor", None)
            self.num_loaded += 1
            time.sleep(self.step_s)
            if not params.progress_callback(step / NUM_TENSORS, None):
                return None
        return 4711

    def model_free(self, model: int) -> None:
        self.freed.append(model)


def load(library: FakeLibrary) -> Any:
    engine = object.__new__(LlamaCppEngine)
    engine._lib = library
    path = Path("some.gguf")
    return patiently(path, lambda goes_on: engine._load_model(path, EngineOptions(), goes_on))[0]


@pytest.fixture(autouse=True)
def usual_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("skydraft.engines.llamacpp.check_gguf", lambda path: None)
    monkeypatch.setattr("skydraft.engines.llamacpp.weights_fingerprint", lambda paths: "")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("step", [0, 7])
def test_it_ends_the_loading_at_once(step: int) -> None:
    library = FakeLibrary(step)
    library.step_s = 0.15
    with pytest.raises(KeyboardInterrupt):
        load(library)
    assert step <= library.num_loaded < NUM_TENSORS // 2 + step // 2  # the handler may run before the step is counted


def test_a_model_that_is_there_by_then_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeLibrary(NUM_TENSORS - 1)
    monkeypatch.setattr("skydraft.engines.llamacpp.Progress", lambda go_on: lambda progress, data: True)
    library.step_s = 0.15
    with pytest.raises(KeyboardInterrupt):
        load(library)
    assert library.freed == [4711] and library.num_loaded == NUM_TENSORS


@pytest.mark.parametrize("where", ["the header", "the weights"])
def test_a_load_that_hangs_is_left_behind(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.engines.llamacpp._SILENCE_S", 0.3)
    library, hangs = FakeLibrary(None), threading.Event()
    if where == "the header":
        monkeypatch.setattr("skydraft.engines.llamacpp.check_gguf", lambda path: hangs.wait(20))
    else:
        library.model_load_from_file = lambda path, params: hangs.wait(20) and 4711  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"some\.gguf does not load"):
        load(library)
    assert time.monotonic() - began < 10
    hangs.set()
    until = time.monotonic() + 10
    while where == "the weights" and library.freed != [4711]:  # it came to life too late
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_slow_load_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skydraft.engines.llamacpp._SILENCE_S", 0.6)
    library = FakeLibrary(None)
    library.step_s = 0.1
    assert load(library) == 4711


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
    assert load(FakeLibrary(3)) == 4711 and seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is mine
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_error_in_the_block_does_not_hide_it() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_kept() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted == [signal.SIGINT]
        raise BrokenModel("cut off")
