"""Errors as OpenAI's error bodies with a status. A client never sees a path or a traceback."""

import itertools
import logging
import time
from collections.abc import Collection
from typing import Any

from pydantic import ValidationError

from skydraft import errors

log = logging.getLogger("skydraft.gateway")
RETRY_AFTER_S = 2
TOO_LONG, SPENT = "context_length_exceeded", "insufficient_quota"
_MOST_CHARS = 1000
# What no client can mend: files, or servers that came up later than the gateway.
_OPERATORS = errors.RecordsError, errors.UnknownModel, errors.VocabularyMismatch, errors.WrongServer


class Refusal(Exception):
    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_after_s = status, code, retry_after_s
        self.message, self.param = message[:_MOST_CHARS], param and param[:_MOST_CHARS]  # may quote the client

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(self.status, kind)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"Retry-After": str(self.retry_after_s)} if self.retry_after_s else {}
        headers |= {"x-should-retry": "false"} if self.code == SPENT else {}  # which SDKs ask for
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def refusal_of(error: Exception, prompt_field: str = "messages") -> Refusal:
    """An unexpected error is logged, and the client does not see its message."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, errors.ContextExceeded):
        # LangChain and LiteLLM recognise this error by these words, and Claude Code compacts by the two numbers.
        said = f"the prompt is too long: {error.num_tokens} tokens > {error.most} maximum."
        message = f"This model's maximum context length is exceeded: {said}"
        return Refusal(400, message, param=prompt_field, code=TOO_LONG)
    if isinstance(error, errors.LimitExceeded):
        return Refusal(400, error.message, param=prompt_field, code=TOO_LONG)
    if isinstance(error, errors.UsageError) and not isinstance(error, _OPERATORS):
        return Refusal(400, error.message)  # its hint is for the command line
    if isinstance(error, errors.BudgetSpent):
        wait_s = 86400 - int(time.time()) % 86400  # until the next day (UTC)
        return Refusal(429, error.message, code=SPENT, retry_after_s=wait_s)
    if isinstance(error, errors.EngineBusy):
        return Refusal(503, error.message, code="busy", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, errors.CloudError):
        code = "cloud_timeout" if isinstance(error, errors.CloudTimeout) else "cloud_lost"
        wait_s = round(error.retry_after_s + 0.5) if isinstance(error, errors.RateLimited) else RETRY_AFTER_S
        return Refusal(503, error.message, code=code, retry_after_s=max(wait_s, 1))
    if not isinstance(error, errors.SkydraftError):
        log.error("a request failed", exc_info=error)
        return Refusal(500, "The gateway failed; its log says why.", code="internal_error")
    log.error("a request failed: %s", error)  # with the hint, which is for the operator
    if isinstance(error, errors.MissingDependency):
        return Refusal(501, f"This server lacks a part: {error.message}", code="not_installed")
    return Refusal(500, "The model failed; the gateway's log says why.", code="engine_error")


_FORMAT = "Use response_format (of a response: text.format) or skydraft.grammar instead."
# Fields of OpenAI's, Anthropic's, vLLM's, SGLang's and llama-server's requests whose effect would be missed, by what to
# do instead. Other unknown fields change no word of an answer, and are passed over.
_NOT_SERVED = {
    "GBNF is not read. Give a Lark grammar or a pattern as skydraft.grammar.": "grammar",
    _FORMAT: "json_schema guided_json structured_outputs output_format",
    "Answers are text.": "audio modalities",
    "Pictures are not read.": "image_data multimodal_data",
    'Write it as "skydraft": {"local_only": true}.': "local_only",  # passed over, the text would be sent
    "Its fields belong into the body itself.": "extra_body",
    "Text can be continued at its end only.": "suffix",
    "An answer ends at its end token; raise min_tokens instead.": "ignore_eos ban_eos_token",
    "The model's own chat template is used.": "chat_template",
    "Write them into a message.": "documents",
    "A prompt that is too long is refused; shorten it.": "truncation truncate_prompt_tokens",
    "Nothing is kept between requests; send the whole conversation.": "previous_response_id conversation",
    "An answer is written while its client waits.": "background",
    "Nothing is searched or run here.": "web_search_options mcp_servers container",
    "The text comes without it.": "include_stop_str_in_output no_stop_trim",
    "Special tokens are left out of a text.": "skip_special_tokens",
    "Use echo of a completion.": "prompt_logprobs",
    "This is not served.": """allowed_token_ids bad_words logprob_token_ids logits_processors custom_logit_processor
        use_beam_search prompt_embeds input_embeds lora lora_path repetition_detection watermarking n_indent samplers
        t_max_predict_ms mirostat typical_p tfs top_a top_n_sigma xtc_probability dynatemp_range dry_multiplier
        adaptive_target post_sampling_probs min_keep response_fields return_hidden_states""",
}


def instead(**fields: str) -> dict[str, str]:
    """Fields that are not served, by what says so: those that are, with the names that others give them."""
    return {name: f"Use {own.replace('__', '.')} instead." for own, names in fields.items() for name in names.split()}


NOT_SERVED = {name: why for why, names in _NOT_SERVED.items() for name in names.split()} | instead(
    n="best_of n_cmpl", max_tokens="n_predict max_new_tokens", min_tokens="min_new_tokens", logprobs="n_probs",
    repetition_penalty="repeat_penalty", stop="stop_regex", tools="functions function_call",
    skydraft__token_ids="return_token_ids return_tokens return_tokens_as_token_ids",
    skydraft__grammar="guided_regex guided_choice guided_grammar structural_tag regex ebnf",
)  # fmt: skip
# What asks for nothing, besides null, false, 0 and what is empty.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"), "modalities": (["text"],), "best_of": (1,), "n_cmpl": (1,), "n_predict": (-1,),
    "repeat_penalty": (1,), "truncation": ("disabled",), "truncate_prompt_tokens": (-1,),
    "skip_special_tokens": (True,), "response_format": ({"type": "text"},), "typical_p": (1,), "tfs": (1,),
    "top_n_sigma": (-1,), "t_max_predict_ms": (-1,), "adaptive_target": (-1,), "max_tokens": (-1,),
}  # fmt: skip
# Options that are fields of the request itself, by our names and by OpenAI's; the key `skydraft` does not take them.
OWN_FIELDS = {"max_new_tokens": "max_tokens"} | {name: name for name in ("stop", "stop_token_ids", "logit_bias")}


_SAID = {"missing": "It is missing.", "too_short": "It is empty.", "union_tag_not_found": "It has no type."}
_ALTERNATIVES = {"str", "int", "list", "text", "NamedTool", "message", "function_call", "function_call_output"}


def invalid(error: ValidationError, kinds: Collection[str]) -> Refusal:
    """What is wrong with a body. The location of an error also holds names of alternatives and `kinds`: no fields."""
    # The client probably meant the alternative of a union whose error lies deepest, or that has the value's type.
    found = error.errors(include_url=False, include_input=False)
    first = max(found, key=lambda each: (len(each["loc"]), not each["type"].endswith("_type")))
    if first["type"] == "json_invalid":
        return Refusal(400, f"The body is not valid JSON: {first['ctx']['error']}.")
    place = [str(part) for part in first["loc"] if isinstance(part, int) or str(part).isidentifier()]
    fields = [part for part in place[1:] if part not in _ALTERNATIVES and part not in kinds]
    param = ".".join(part for part, _ in itertools.groupby([*place[:1], *fields])) or None
    return Refusal(400, f"{param or 'The body'}: {_said(first, place)}", param=param)


def _said(error: Any, place: list[str]) -> str:
    kind, facts = error["type"], error.get("ctx", {})
    if kind == "union_tag_invalid":
        known = f" Use one of: {facts['expected_tags']}." if "function_call" not in facts["expected_tags"] else ""
        return f"There is no type '{facts['tag']}' here.{known}"  # each interface has other names for calls
    if kind == "extra_forbidden":
        own = OWN_FIELDS.get(place[-1])
        return f"There is no such field. {f'Use {own} of the request.' if own else 'Remove it.'}"
    return _SAID.get(kind) or error["msg"].removeprefix("Value error, ")
