"""A fake vLLM that takes drafts: its steps, rows and requests are told to `skydraft_vllm.Drafts` as vLLM tells them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
from skydraft_vllm import Drafts

from skydraft.engines.base import Engine
from tests.stock.answering import Model, Run, Token
from tests.stock.dialects import Vllm
from tests.stock.fakes import Fake

MAX_LEN = 512


def config(num_drafts: int = 7, vocab_size: int = 64, **parallel: int) -> Any:
    """What vLLM tells the class of itself."""
    ranks = {"rank": 0, "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_index": 0} | parallel
    model = SimpleNamespace(get_vocab_size=lambda: vocab_size, max_model_len=MAX_LEN)
    speculative = SimpleNamespace(num_speculative_tokens=num_drafts, rejection_sample_method="standard")
    return SimpleNamespace(speculative_config=speculative, model_config=model, parallel_config=SimpleNamespace(**ranks))


class FakeModelRunner:
    """The rows of vLLM's batch. Its class is called as vLLM calls it, from a method of the runner."""

    def __init__(self, num_drafts: int = 7, vocab_size: int = 64) -> None:
        self.token_ids = np.zeros((128, MAX_LEN), np.int32)
        self.lengths = np.zeros(128, np.int32)
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=list[str](), num_prompt_tokens=np.zeros(128, np.int32))
        self.drafts: Any = Drafts(config(num_drafts, vocab_size))

    def step(self, rows: list[tuple[str, int, list[int]]], num_new: int = 1) -> list[list[int]]:
        """The drafts after a step of texts: (name, length of the prompt, all tokens). They may stand in any order."""
        for row, (name, prompt_len, token_ids) in enumerate(rows):
            self.token_ids[row, : len(token_ids)] = token_ids
            self.token_ids[row, len(token_ids) :] = 7  # of somebody else
            self.lengths[row] = len(token_ids)
            extra = {"skydraft": name} if name else None
            self.requests[f"r{name}"] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
            self.input_batch.num_prompt_tokens[row] = prompt_len
        self.input_batch.req_ids = [f"r{name}" for name, _, _ in rows]
        sampled = [[0] * num_new if len(token_ids) > prompt_len else [] for _, prompt_len, token_ids in rows]
        found = self.drafts.propose(sampled, self.lengths, self.token_ids, slot_mappings=None)
        assert isinstance(found, list) and len(found) == len(rows)
        return found


class DraftingVllm(Vllm):
    """Each request is a step of one row. `forwards` counts them; a step takes `token_s`."""

    def __init__(self, model: Model, *, token_s: float = 0.0) -> None:
        super().__init__(model, token_s=token_s)
        self.runner = FakeModelRunner(7, model.engine.vocab.size)
        self.forwards = 0

    async def steps(self, run: Run) -> AsyncIterator[list[Token]]:
        name = (run.body.get("vllm_xargs") or {}).get("skydraft", "")
        tokens, text, drafts = self.model.write(run.asked, run.prompt, run.num, run.how), [*run.prompt], list[int]()
        step = list[Token]()
        while not step or not step[-1].ends:
            await asyncio.sleep(self.token_s)
            self.forwards += 1
            step = []
            for token in tokens:
                step.append(token)
                if token.ends or not drafts or drafts.pop(0) != token.id:
                    break
            text += [token.id for token in step]
            drafts = self.runner.step([(name, len(run.prompt), text)], len(step))[0]
            yield step


@contextmanager
def drafting_vllm(engine: Engine, **how: Any) -> Iterator[tuple[Fake, DraftingVllm, str]]:
    """The server, its dialect, and where its port for drafts is."""
    dialect = DraftingVllm(Model(engine, "toy", block_len=16), **how)
    server = Fake(dialect)
    try:
        yield server, dialect, dialect.runner.drafts.port.address
    finally:
        server.kill()
        dialect.runner.drafts.port.close()
