"""A prompt as the model was trained to see it: the chat template that comes with the model."""

from __future__ import annotations

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skydraft.engines.vocab import Vocab
from skydraft.errors import BrokenModel, PromptError


def render_prompt(vocab: Vocab, prompt: str, system: str | None = None) -> str:
    """The text that asks for an answer to `prompt`. A model without a template gets the prompt as it is.

    Raises PromptError for an empty prompt, BrokenModel for a template that does not render.
    """
    if not prompt.strip():
        raise PromptError("The prompt is empty.", hint="Give at least one word, or - to read it from stdin.")
    if vocab.chat_template is None:
        if system:
            raise PromptError("This model has no chat template, so a system prompt has no place.")
        return vocab.bos_text + prompt
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    try:
        template = environment.from_string(vocab.chat_template)
        return template.render(
            messages=messages, add_generation_prompt=True, bos_token=vocab.bos_text, eos_token=vocab.eos_text
        )
    except TemplateError as error:
        raise BrokenModel(
            f"The chat template of the model does not render: {error}.", hint="Use --raw to leave it away."
        ) from error


def _raise(message: str) -> None:
    raise TemplateError(message)
