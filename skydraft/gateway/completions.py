"""Answers to OpenAI's completions, whole or as server-sent events."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any

from skydraft.gateway.answers import ChatAnswer, Choice
from skydraft.gateway.desk import Began, Event
from skydraft.gateway.logprobs import text_logprobs
from skydraft.gateway.schema import TextRequest
from skydraft.types import Score


class TextAnswer(ChatAnswer):
    reads = TextRequest
    kinds = "text_completion", "text_completion", "cmpl"

    def first(self) -> Iterator[dict[str, Any]]:
        """The echoed prompt. With log-probabilities it comes when it was read."""
        for index, choice in enumerate(self.choices):
            if choice.prefix and self._body.num_best is None:
                yield self._chunk(index, {"content": choice.prefix})

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        yield from super().take(index, event)
        if isinstance(event, Began) and event.prompt_scores:
            logprobs = self._logprobs(event.prompt_scores, 0)
            yield self._chunk(index, {"content": self.choices[index].prefix}, logprobs=logprobs)

    def _logprobs(self, scores: Seq[Score], offset: int) -> dict[str, Any] | None:
        return None if self._body.num_best is None else text_logprobs(self._vocab, scores, offset)

    def _part(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": delta.get("content", ""), "logprobs": logprobs}

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prefix + choice.text}
