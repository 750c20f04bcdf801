"""OpenAI's `/v1/completions`: its body, and its answers, whole or as server-sent events."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from skydraft.gateway.answers import Choice, text_logprobs
from skydraft.gateway.chats import ChatAnswer
from skydraft.gateway.desk import Began, Event
from skydraft.gateway.items import Some
from skydraft.gateway.schema import MAX_CHOICES, MAX_LOGPROBS, Ask, Body, MaxTokens, TokenIds
from skydraft.types import Score

_Prompt = Annotated[str, Field(strict=True)] | TokenIds


def _listed(prompt: Any) -> Any:
    """Make a list of a single prompt, which is a text or token ids."""
    is_one = not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int))
    return [prompt] if is_one else prompt


class TextRequest(Body):
    of_others = frozenset(("response_format", "top_logprobs"))
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[Some[_Prompt], Field(min_length=1, max_length=MAX_CHOICES), BeforeValidator(_listed)]
    max_new_tokens: MaxTokens | Literal[0] = Field(None, alias="max_tokens")
    best_of: Literal[1] | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # 0: of the chosen tokens only

    def to_ask(self) -> Ask:
        return Ask(
            self, prompts=self.prompt, max_tokens=self.max_new_tokens, num_best=self.logprobs, echoes=bool(self.echo)
        )


class TextAnswer(ChatAnswer):
    reads = TextRequest
    kinds = "text_completion", "text_completion", "cmpl"

    def first(self) -> Iterator[dict[str, Any]]:
        """Yield the echoed prompt. With log-probabilities it comes later, once it was read."""
        for index, choice in enumerate(self.choices):
            if choice.prefix and self._ask.num_best is None:
                yield self._chunk(index, {"content": choice.prefix})

    def take(self, index: int, event: Event) -> Iterator[dict[str, Any]]:
        yield from super().take(index, event)
        if isinstance(event, Began) and event.prompt_scores:
            logprobs = self._logprobs(event.prompt_scores, 0)
            yield self._chunk(index, {"content": self.choices[index].prefix}, logprobs=logprobs)

    def _logprobs(self, scores: Seq[Score], offset: int) -> dict[str, Any] | None:
        return None if self._ask.num_best is None else text_logprobs(self._vocab, scores, offset)

    def _part(self, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"text": delta.get("content", ""), "logprobs": logprobs}

    def _text(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.prefix + choice.text}
