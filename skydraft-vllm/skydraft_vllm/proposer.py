"""The class that vLLM asks for drafts. Its calls never raise, never wait, and return only lists that vLLM accepts."""

import logging
import sys
import time
from typing import Any

from skydraft_vllm.port import Port
from skydraft_vllm.settings import Settings, unfit
from skydraft_vllm.texts import Texts

# Below vLLM's own logger, so that the lines appear in its log.
log = logging.getLogger("vllm.skydraft_vllm")
_QUIET_S = 60.0  # shortest time between two logged errors
_NAME = "skydraft"  # the key of a text's name in `vllm_xargs`


class Drafts:
    """vLLM makes one in each worker, with its configuration, and calls `propose` after each step.

    A list that is too long, an id outside the vocabulary or an exception would end vLLM's engine for all clients. So an
    error here only costs drafts and adds a line to the log.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._runner: Any = None
        self._req_ids: list[str] = []
        self._rows: dict[str, int] = {}  # rows of texts with a name, by name
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
        """Do nothing: there is no model to load."""

    def propose(
        self, sampled_token_ids: Any, num_tokens_no_spec: Any, token_ids_cpu: Any, *others: Any, **more: Any
    ) -> list[list[int]]:
        """Return drafts for each row, from the step's sampled ids [row][token], lengths [row] and ids [row, token]."""
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
        """Return (row, prompt length) of each text that vLLM has a name for."""
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
    """Find vLLM's model runner on the call stack: only it has the requests' names.

    Raises RuntimeError in a vLLM that makes the class elsewhere.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        found = frame.f_locals.get("self")
        if type(found).__name__.endswith("ModelRunner"):
            return found
        frame = frame.f_back
    raise RuntimeError("this vLLM does not reveal the names of requests")
