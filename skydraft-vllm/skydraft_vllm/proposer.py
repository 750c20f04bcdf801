"""What vLLM asks for drafts. It never raises, never waits, and returns only lists that vLLM can take."""

import logging
import sys
import time
from typing import Any

from skydraft_vllm.port import Port
from skydraft_vllm.settings import Settings, unfit
from skydraft_vllm.texts import Texts

# Below vLLM's own logger, so that the lines appear in its log.
log = logging.getLogger("vllm.skydraft_vllm")
_QUIET_S = 60.0  # between two reports of an error
_NAME = "skydraft"  # of a text, in `vllm_xargs`


class Drafts:
    """vLLM makes one in each worker, with its configuration, and calls `propose` after each step.

    A list that is too long, an id that the vocabulary does not have, or an exception would end vLLM's engine for all
    clients. So whatever goes wrong costs drafts and a line in the log, nothing else.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._runner: Any = None
        self._req_ids: list[str] = []
        self._rows: dict[str, int] = {}  # of named texts
        self._told_at = -_QUIET_S
        self._texts: Texts | None = None
        self.port: Port | None = None
        try:
            self._begin(vllm_config)
        except Exception as error:
            log.error("skydraft: no drafts: %s", error)

    def _begin(self, vllm_config: Any) -> None:
        if reason := unfit(vllm_config):
            log.warning("skydraft: no drafts: %s", reason)
            return
        speculative, model = vllm_config.speculative_config, vllm_config.model_config
        texts = Texts(speculative.num_speculative_tokens, model.get_vocab_size(), model.max_model_len)
        settings = Settings.from_environment(vllm_config.parallel_config.data_parallel_index)
        self._runner = _runner()
        self.port = Port(settings, texts)
        self._texts = texts
        log.info("skydraft: devices may send drafts to %s", self.port.address)

    def load_model(self, target_model: Any) -> None:
        """There is no model to load."""

    def propose(
        self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, *others: Any, **more: Any
    ) -> list[list[int]]:
        """Drafts for each row of the step: what was sampled [row][token], the lengths of the rows, and their tokens."""
        try:
            if self._texts is None or self._texts.is_empty:
                return _nothing(sampled_token_ids)
            num_rows, now = len(sampled_token_ids), time.perf_counter()
            named, lengths = self._named(num_rows), num_tokens_no_spec[:num_rows].tolist()
            return self._texts.drafts_for(sampled_token_ids, lengths, token_ids_cpu, named, now)
        except Exception:
            if (now := time.monotonic()) - self._told_at > _QUIET_S:
                self._told_at = now
                log.exception("skydraft: no drafts in this step")
            return _nothing(sampled_token_ids)

    def _named(self, num_rows: int) -> dict[str, tuple[int, int]]:
        """Row and prompt's length of each text that gave its name to vLLM."""
        batch, requests = self._runner.input_batch, self._runner.requests
        req_ids = batch.req_ids[:num_rows]
        if req_ids != self._req_ids:
            extra = [requests[each].sampling_params.extra_args or {} for each in req_ids]
            self._rows = {each[_NAME]: row for row, each in enumerate(extra) if isinstance(each.get(_NAME), str)}
            self._req_ids = list(req_ids)
        return {name: (row, int(batch.num_prompt_tokens[row])) for name, row in self._rows.items()}


def _nothing(sampled: Any) -> list[list[int]]:
    return [[] for _ in sampled] if isinstance(sampled, list) else []


def _runner() -> Any:
    """vLLM's model runner, which makes the class. It knows the names of requests, and vLLM does not pass them on.

    Raises RuntimeError in a vLLM that makes the class elsewhere.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        found = frame.f_locals.get("self")
        if type(found).__name__.endswith("ModelRunner"):
            return found
        frame = frame.f_back
    raise RuntimeError("this vLLM does not tell the names of requests")
