"""The judge's access to vLLM's engine: ids in, a pooler's answer out. The engine may end and be started again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from skydraft.cloud.seats import Served
from skydraft.cloud.vllm.asking import Asking
from skydraft.cloud.vllm.launch import Stderr, VllmOptions, engine_args, launch_error, library, read_config
from skydraft.engines.checkpoint import load_vocab, weights_fingerprint
from skydraft.engines.vocab import TokenIds
from skydraft.errors import BrokenModel, EngineEnded, EngineError

_WEIGHTS = ("*.safetensors", "*.bin", "config.json")
_MAX_ROWS = 512  # of a block, the most in one request; the pooler judges them in parts


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer of vLLM's worker to a request, and how many of its tokens were in the prefix cache."""

    data: bytes
    num_cached: int


class VllmEngine:
    """One AsyncLLM. Call `start` in the thread of the event loop that `pool` uses, or without an event loop."""

    def __init__(self, options: VllmOptions) -> None:
        self._vllm, self.version = library()
        config = read_config(options.folder)
        if (longest := config.get("max_position_embeddings")) and longest < options.context_len:
            options = replace(options, context_len=longest)
        self._options = options
        self._args = engine_args(self._vllm, options, config["architectures"][0])
        vocab = load_vocab(options.folder)
        if config.get("vocab_size", 0) < vocab.size:
            raise BrokenModel(f"The tokenizer in {options.folder} has more tokens than its model.")
        files = [file for kind in _WEIGHTS for file in options.folder.glob(kind)]
        self.served = Served(
            name=options.name,
            weights=f"{weights_fingerprint(files)} vllm {options.dtype}",
            vocab=vocab,
            context_len=options.context_len,
            execution=options.execution,
            max_rows=_MAX_ROWS,
            invariant_rows=1,
            forward_ms=(1.0,),
            engine=f"vllm {self.version}",
            dtype=options.dtype,
        )
        self._llm: Any = None
        self._stderr: Stderr | None = None
        self._numbers = count()

    def start(self) -> None:
        """Start vLLM's processes; this takes about ten seconds. Raises EngineError."""
        from vllm.v1.engine.async_llm import AsyncLLM

        self._stderr = Stderr()
        try:
            with self._stderr.taken():
                self._llm = AsyncLLM.from_engine_args(self._args)
        except (Exception, SystemExit) as error:
            failure = launch_error(error, self._stderr)
            self._stderr.close()
            raise failure from error

    @property
    def has_ended(self) -> bool:
        """Whether the engine has ended and must be started again."""
        return self._llm is None or bool(self._llm.errored)

    @property
    def cause(self) -> str:
        """The cause of the last error on the processes' stderr, or ""."""
        return self._stderr.cause() if self._stderr else ""

    async def pool(self, token_ids: TokenIds, salt: str, asking: Asking | None, *, skip_cache: bool = False) -> Pooled:
        """Let the pooler judge a request, or only read its tokens. Requests share cache only under the same `salt`.

        Raises EngineEnded if the engine ends meanwhile.
        """
        from vllm import PoolingParams
        from vllm.inputs import tokens_input

        params = PoolingParams(
            task="token_classify", skip_reading_prefix_cache=skip_cache, extra_kwargs=asking.sent() if asking else {}
        )
        prompt = tokens_input(token_ids.tolist(), cache_salt=salt)
        if self.has_ended:
            raise EngineEnded("vLLM's engine has ended.")
        output: Any = None
        try:
            async for each in self._llm.encode(prompt, params, str(next(self._numbers))):
                output = each
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self.has_ended:
                raise EngineEnded("vLLM's engine has ended.") from error
            raise EngineError(f"vLLM refused a request: {error}") from error
        return Pooled(np.asarray(output.outputs.data, np.uint8).tobytes(), output.num_cached_tokens or 0)

    def stop(self) -> None:
        """End vLLM's processes; a second call does nothing."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
        if self._stderr is not None:
            self._stderr.close()
