"""Let the target answer prompts, many in parallel at a server. Each finished answer is kept as a lesson."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace

from skydraft import api
from skydraft.decoding.builder import prompted
from skydraft.decoding.generation import Generation
from skydraft.decoding.plan import make_plan
from skydraft.decoding.request import GenerateRequest
from skydraft.edge.cloud import Cloud
from skydraft.engines.base import Engine
from skydraft.engines.vocab import check_same
from skydraft.lab.learning.collect import lesson_of
from skydraft.lab.learning.lessons import Lesson, Store, params_entry

NUM_SIDE_BY_SIDE = 16  # texts that a server writes at a time


class Answering:
    """Answers of the target `cloud` to requests, each once. Answers in `store` are reused. `weights` identifies the
    target. `edge` only encodes the prompts."""

    def __init__(
        self, requests: Sequence[GenerateRequest], edge: Engine, cloud: Engine | Cloud, weights: str, store: Store
    ) -> None:
        self._edge, self._cloud, self._weights, self._store = edge, cloud, weights, store
        asks = [replace(each, plan=make_plan("cloud")) for each in requests]
        reads = [prompted(each, edge) for each in asks]
        if isinstance(cloud, Engine):  # else it would use its own template
            check_same(edge.vocab, cloud.vocab)
            for at, read in enumerate(reads):
                begun = () if read.begun_is_prompt else read.begun  # the prompt has them
                asks[at] = replace(asks[at], prompt_ids=read.prompts.edge.token_ids, params=read.params, begun=begun)
        self._keys = [_key(each.prompts.edge.token_ids, each) for each in reads]
        self._missing, self._found = dict(zip(self._keys, asks, strict=True)), dict[str, Lesson]()
        for lesson in store.lessons(Counter()) if asks else ():  # read singly: there may be many
            if (lesson.target, lesson.vocab) == (weights, edge.vocab.fingerprint):
                self._note(_key(lesson.prompt_ids, lesson), lesson)

    def _note(self, key: str, lesson: Lesson) -> None:
        if self._missing.pop(key, None):
            self._found[key] = lesson

    @property
    def todo(self) -> list[GenerateRequest]:
        """The requests without an answer, each once."""
        return list(self._missing.values())

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens that the target still has to read."""
        return sum(len(prompted(each, self._edge).prompts.target.token_ids) for each in self.todo)

    def run(self, on_done: Callable[[Lesson], None]) -> list[Lesson | None]:
        """Answer the open requests. Return each request's lesson, None where the target wrote nothing.

        Call `on_done` after each answer, from any thread, one at a time. The first error, also from `on_done`, stops
        new answers and is raised; finished answers are kept. Ctrl-C also ends the answers in progress.
        """
        is_over, lock, under_way = threading.Event(), threading.Lock(), list[Generation]()

        def answer(key: str, request: GenerateRequest) -> None:
            with api.start(request, edge=self._edge, cloud=self._cloud) as generation:
                under_way.append(generation)
                if is_over.is_set() or not generation.run().finish_reason:
                    return
                lesson = lesson_of(generation, self._edge.fingerprint, self._weights, self._edge.vocab.fingerprint)
                with lock:
                    if lesson is not None:
                        self._store.add(lesson)
                        self._note(key, lesson)
                        on_done(lesson)

        with ThreadPoolExecutor(1 if isinstance(self._cloud, Engine) else NUM_SIDE_BY_SIDE) as pool:
            try:
                asked = [pool.submit(answer, key, request) for key, request in [*self._missing.items()]]
                done, _ = wait(asked, return_when=FIRST_EXCEPTION)
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
        return [self._found.get(key) for key in self._keys]


def _key(prompt_ids: Sequence[int], told: Lesson | GenerateRequest) -> str:
    """Return a key for the prompt and the parameters that differ from the default."""
    params = told.params if isinstance(told, Lesson) else params_entry(told.params)
    return f"{tuple(prompt_ids)} {sorted(params.items())}"
