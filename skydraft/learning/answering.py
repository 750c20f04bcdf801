"""Lets the target answer many prompts side by side, and keeps each answer as a lesson as soon as it is whole."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import TypeVar

from skydraft import api
from skydraft.decoding.builder import prompted
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.learning.collect import lesson_of
from skydraft.learning.lessons import Lesson, Store, params_entry

NUM_SIDE_BY_SIDE = 16  # texts that the target writes at a time
SPARE = 32  # tokens
K = TypeVar("K")


def side_by_side(
    requests: Mapping[K, GenerateRequest], edge: Engine, cloud: Cloud, on_done: Callable[[K, Generation], None]
) -> None:
    """Answer requests, many at a time, and call `on_done` with each answer, from some thread, one at a time. After the
    first error no other is begun, and it is raised. Ctrl-C ends those under way, too."""
    is_over, lock, under_way = threading.Event(), threading.Lock(), list[Generation]()

    def answer(key: K) -> None:
        with api.start(requests[key], edge=edge, cloud=cloud) as generation:
            under_way.append(generation)
            if not is_over.is_set() and generation.run().finish_reason:
                with lock:
                    on_done(key, generation)

    with ThreadPoolExecutor(NUM_SIDE_BY_SIDE) as pool:
        try:
            done, _ = wait([pool.submit(answer, key) for key in requests], return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt:
            is_over.set()
            for generation in under_way:
                generation.cancel()
            raise
        finally:
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
        for each in done:
            each.result()


class Answering:
    """Answers of the target `cloud` to requests, each once: what `store` has is not asked again. `weights` names the
    target. `edge` reads the prompts, and writes nothing."""

    def __init__(
        self, requests: Sequence[GenerateRequest], edge: Engine, cloud: Cloud, weights: str, store: Store
    ) -> None:
        self._edge, self._cloud, self._weights, self._store = edge, cloud, weights, store
        asks = [replace(each, plan=make_plan("cloud")) for each in requests]
        reads = [prompted(each, edge) for each in asks]
        self._keys = [_key(read.edge.token_ids, resolved) for resolved, read in reads]
        self._missing, self._found = dict(zip(self._keys, asks, strict=True)), dict[str, Lesson]()
        for lesson in store.lessons(Counter()) if asks else ():  # one in memory at a time: there may be many others
            if (lesson.target, lesson.vocab) == (weights, edge.vocab.fingerprint):
                self._note(_key(lesson.prompt_ids, lesson), lesson)

    def _note(self, key: str, lesson: Lesson) -> None:
        if self._missing.pop(key, None):
            self._found[key] = lesson

    @property
    def todo(self) -> list[GenerateRequest]:
        """The requests that have no answer yet, each once."""
        return list(self._missing.values())

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the target has to read for what is left to do."""
        return sum(len(prompted(each, self._edge)[1].target.token_ids) for each in self.todo)

    def run(self, on_done: Callable[[Lesson], None]) -> list[Lesson | None]:
        """Answer what is left to do; returns the lesson of each request, None where the target wrote nothing.

        Calls `on_done` after each answer, from some thread; an error that it raises ends the run, and what was
        answered until then is kept. Raises a SkydraftError.
        """

        def keep(key: str, answer: Generation) -> None:
            lesson = lesson_of(answer, self._edge.fingerprint, self._weights, self._edge.vocab.fingerprint)
            if lesson is not None:
                self._store.add(lesson)
                self._note(key, lesson)
                on_done(lesson)

        side_by_side(dict(self._missing), self._edge, self._cloud, keep)
        return [self._found.get(key) for key in self._keys]


def longest_of(requests: Sequence[GenerateRequest], edge: Engine) -> int:
    """How many tokens the longest prompt has together with its answer, and a few more."""
    prompts = (prompted(each, edge)[1].target.token_ids for each in requests)
    lengths = (len(ids) + each.params.max_new_tokens for ids, each in zip(prompts, requests, strict=True))
    return max(lengths) + SPARE


def _key(prompt_ids: Sequence[int], told: Lesson | GenerateRequest) -> str:
    """What an answer is an answer to: the prompt, and the parameters that were not the default."""
    params = told.params if isinstance(told, Lesson) else params_entry(told.params)
    return f"{tuple(prompt_ids)} {sorted(params.items())}"
