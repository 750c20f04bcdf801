"""The body of a text completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from skydraft.gateway.parts import Some
from skydraft.gateway.refusals import NOT_SERVED
from skydraft.gateway.schema import MAX_CHOICES, MAX_LOGPROBS, AnyRequest, MaxTokens, TokenIds


class TextRequest(AnyRequest):
    """`POST /v1/completions`."""

    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED | {"response_format": "Use skydraft.grammar instead."}
    names: ClassVar[Mapping[str, str]] = {"messages": "prompt"}

    prompt: Annotated[Some[Annotated[str, Field(strict=True)] | TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    max_tokens: MaxTokens | Literal[0] = None
    echo: bool | None = None
    # False asks for none; 0 asks for those of the chosen tokens.
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        """A list of prompts, each a text or token ids; one alone is a list of one."""
        if not isinstance(prompt, list) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if len(prompt) > MAX_CHOICES:
            raise ValueError(f"1 to {MAX_CHOICES} prompts at once")
        return prompt

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, so nothing is left to answer; set echo for the prompt")
        return self

    @property
    def num_best(self) -> int | None:
        """How many of the best tokens to list beside each; None if no log-probabilities are wanted."""
        return self.logprobs
