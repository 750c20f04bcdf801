"""Fields of the requests of OpenAI, Anthropic, vLLM, SGLang and llama-server: followed, refused by name or harmless."""

from __future__ import annotations

import itertools
import json
from typing import Any, get_type_hints

import httpx2 as httpx
import pytest

from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair

from ..later import later
from .running import PATIENCE_S, Running, gateway

chats = later("openai.types.chat.completion_create_params")
texts = later("openai.types.completion_create_params")
responses = later("openai.types.responses.response_create_params")

ASKED = [{"role": "user", "content": "语速"}]
CHAT = ("/v1/chat/completions", {"messages": ASKED})
TEXT = ("/v1/completions", {"prompt": "语速"})
RESPONSES = ("/v1/responses", {"input": "语速"})
MESSAGES = ("/v1/messages", {"messages": ASKED})
INTERFACES = {"chat": CHAT, "text": TEXT, "responses": RESPONSES, "messages": MESSAGES}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# What other tests show to have an effect; the value is taken.
FOLLOWED: dict[str, Any] = {
    "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 2, "min_tokens": 1, "model": "skydraft-edge",
    "presence_penalty": 0.5, "repetition_penalty": 1.1, "seed": 4, "stop": ["x"], "stop_token_ids": [5],
    "stream": False, "stream_options": {"include_usage": True}, "temperature": 0.5, "top_k": 3, "top_p": 0.5,
    "min_p": 0.1, "cache_salt": "a",
}  # fmt: skip
FOLLOWED_IN: dict[str, dict[str, Any]] = {
    "chat": {
        "add_generation_prompt": True, "continue_final_message": False, "logprobs": True, "max_completion_tokens": 2,
        "messages": ASKED, "n": 2, "parallel_tool_calls": False, "response_format": {"type": "text"},
        "tool_choice": "none", "tools": [TOOL], "top_logprobs": 0,
    },
    "text": {"echo": True, "logprobs": 1, "n": 2, "prompt": "a"},
    "responses": {
        "include": ["message.output_text.logprobs"], "input": "a", "instructions": "b", "max_output_tokens": 2,
        "parallel_tool_calls": False, "text": {"format": {"type": "text"}}, "tool_choice": "none", "tools": [],
        "top_logprobs": 0, "metadata": {"a": "b"},
    },
    "messages": {
        "max_tokens": 2, "messages": ASKED, "stop_sequences": ["x"], "system": "b", "tool_choice": {"type": "none"},
        "tools": [],
    },
}  # fmt: skip
# Hints, names and figures: no word of the answer depends on them, or what they ask for is done anyway.
HARMLESS: dict[str, Any] = {
    # OpenAI
    "access_programs": ["x"], "background_options": {}, "context_management": [{"type": "compaction"}], "image": {},
    "max_tool_calls": 3, "metadata": {"a": "b"}, "moderation": {}, "prediction": {"type": "content", "content": "a"},
    "prompt_cache_key": "a", "prompt_cache_options": {}, "prompt_cache_retention": "24h", "reasoning_effort": "low",
    "reasoning": {"effort": "low"}, "safety_identifier": "a", "service_tier": "auto", "store": True,
    "user": "a", "verbosity": "low",
    # Anthropic
    "cache_control": {"type": "ephemeral"}, "inference_geo": "eu", "output_config": {"effort": "low"},
    "thinking": {"type": "disabled"}, "betas": ["a"],
    # vLLM and SGLang
    "chat_template_kwargs": {"enable_thinking": False},
    "include_reasoning": True, "kv_transfer_params": {"a": 1}, "length_penalty": 1.5,
    "mm_processor_kwargs": {"a": 1}, "priority": 0, "request_id": "a", "rid": "a", "session_id": "a",
    "separate_reasoning": True, "spaces_between_special_tokens": False, "stream_interval": 2,
    "thinking_token_budget": 100, "truncation_side": "left", "vllm_xargs": {"a": 1},
    # llama-server
    "cache_prompt": True, "dry_base": 1.75, "dry_allowed_length": 2, "dynatemp_exponent": 1, "id_slot": 0,
    "mirostat_eta": 0.1, "mirostat_tau": 5, "n_discard": 0, "n_keep": 4, "parse_tool_calls": True,
    "reasoning_format": "none", "repeat_last_n": 64, "return_progress": True, "timings_per_token": True,
    "verbose": True, "xtc_threshold": 0.1,
    # of other servers
    "keep_alive": "5m", "options": {"num_ctx": 9}, "provider": {"order": ["a"]}, "client_metadata": {"a": "b"},
}  # fmt: skip
# The effect would be missed: refused by name, and taken where it asks for nothing.
REFUSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "adaptive_target": (0.5, (-1,)), "allowed_token_ids": ([1], ([], None)), "audio": ({"voice": "a"}, (None,)),
    "background": (True, (False,)), "bad_words": (["a"], ([],)), "ban_eos_token": (True, (False,)),
    "best_of": (3, (1, None)), "chat_template": ("{{ messages }}", (None, "")), "container": ("a", (None,)),
    "conversation": ("a", (None,)), "custom_logit_processor": ("a", (None,)), "documents": ([{"text": "a"}], ([],)),
    "dry_multiplier": (0.8, (0,)), "dynatemp_range": (0.5, (0, 0.0)), "ebnf": ("a", ("",)),
    "function_call": ({"name": "a"}, ("none", "auto")), "functions": ([{"name": "a"}], ([],)),
    "grammar": ("root ::= x", ("",)), "guided_choice": (["a"], ([],)), "guided_grammar": ("a", (None,)),
    "guided_json": ({"type": "object"}, (None, {})), "guided_regex": ("a", ("",)), "ignore_eos": (True, (False,)),
    "image_data": (["a"], ([],)), "include_stop_str_in_output": (True, (False,)), "input_embeds": ([[1]], (None,)),
    "json_schema": ({"type": "object"}, ({},)), "logits_processors": (["a"], (None,)),
    "logprob_token_ids": ([5], (None,)), "lora": ([{"id": 0, "scale": 1}], ([],)), "lora_path": ("a", (None,)),
    "max_new_tokens": (5, (None,)), "mcp_servers": ([{"url": "a"}], ([],)), "min_keep": (2, (0,)),
    "min_new_tokens": (2, (0,)), "mirostat": (2, (0,)), "modalities": (["text", "audio"], (["text"],)),
    "multimodal_data": (["a"], ([],)), "n_cmpl": (2, (1,)), "n_indent": (2, (0,)), "n_predict": (5, (-1,)),
    "n_probs": (2, (0,)), "no_stop_trim": (True, (False,)), "output_format": ({"type": "json_schema"}, (None,)),
    "post_sampling_probs": (True, (False,)), "previous_response_id": ("a", (None, "")),
    "prompt_embeds": ("a", (None,)), "prompt_logprobs": (0, (None,)), "regex": ("a", ("",)),
    "repeat_penalty": (1.1, (1, 1.0)), "repetition_detection": ({"a": 1}, (None,)), "response_fields": (["a"], ([],)),
    "return_hidden_states": (True, (False,)), "return_token_ids": (True, (False,)), "return_tokens": (True, (False,)),
    "return_tokens_as_token_ids": (True, (False,)), "samplers": (["top_k"], ([],)),
    "skip_special_tokens": (False, (True,)), "stop_regex": ("a", (None,)), "structural_tag": ("a", (None,)),
    "structured_outputs": ({"json": {}}, (None,)), "suffix": ("a", ("",)), "t_max_predict_ms": (5, (0, -1)),
    "tfs": (0.5, (1,)), "top_a": (0.5, (0,)), "top_n_sigma": (1, (-1,)), "truncate_prompt_tokens": (5, (-1, None)),
    "truncation": ("auto", ("disabled", None)), "typical_p": (0.5, (1, 1.0)), "use_beam_search": (True, (False,)),
    "watermarking": (True, (False,)), "web_search_options": ({"search_context_size": "low"}, (None,)),
    "xtc_probability": (0.5, (0,)),
}  # fmt: skip
REFUSED_IN: dict[str, dict[str, Any]] = {
    "chat": {},
    "text": {"response_format": {"type": "json_object"}},
    "responses": {
        "max_completion_tokens": 2, "max_tokens": 2, "prompt": {"id": "a"}, "response_format": {"type": "json_object"},
    },
    "messages": {
        "max_completion_tokens": 2, "output_config": {"format": {"type": "json_schema"}},
        "response_format": {"type": "json_object"}, "stop": ["a"],
    },
}  # fmt: skip


def post(served: Running, interface: str, **fields: Any) -> httpx.Response:
    path, body = INTERFACES[interface]
    length = {} if {"max_tokens", "max_output_tokens", "max_completion_tokens"} & fields.keys() else {
        "max_output_tokens" if interface == "responses" else "max_tokens": 2
    }  # fmt: skip
    given = {"model": "skydraft-edge"} | body | length | fields
    return httpx.post(f"{served.url}{path}", json=given, timeout=PATIENCE_S)


def refused(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error.get("param") or error["message"].partition(":")[0], error["message"]


@pytest.mark.parametrize("interface", INTERFACES)
def test_harmless_fields_and_those_that_ask_for_nothing_are_taken(served: Running, interface: str) -> None:
    fields = FOLLOWED | FOLLOWED_IN[interface] | HARMLESS
    fields = {name: value for name, value in fields.items() if name not in REFUSED_IN[interface]}
    fields |= {"output_config": {"effort": "low"}, "top_logprobs": 0} if interface == "messages" else {}
    neutral = [{name: values[min(at, len(values) - 1)] for name, (_, values) in REFUSED.items()} for at in range(2)]
    for body in (fields, *neutral):
        answer = post(served, interface, **body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("interface", INTERFACES)
def test_fields_that_are_not_served_are_refused_by_name(served: Running, interface: str) -> None:
    asked = {name: value for name, (value, _) in REFUSED.items()} | REFUSED_IN[interface]
    for name, value in asked.items():
        status, param, message = refused(post(served, interface, **{name: value}))
        assert (status, param.split(".")[0]) == (400, name) and message.startswith(f"{name}"), (name, message)
        assert len(message) > len(name) + 10


@pytest.mark.parametrize("interface", ["chat", "text", "responses"])
def test_every_field_of_the_sdk_is_in_a_table(interface: str) -> None:
    kind = {
        "chat": lambda: chats.CompletionCreateParamsBase, "text": lambda: texts.CompletionCreateParamsBase,
        "responses": lambda: responses.ResponseCreateParamsBase,
    }[interface]()  # fmt: skip
    known = {*FOLLOWED, *FOLLOWED_IN[interface], *HARMLESS, *REFUSED, *REFUSED_IN[interface]}
    assert get_type_hints(kind).keys() <= known


def test_a_seed_of_minus_one_is_random(served: Running) -> None:
    """So it is for llama-server and vLLM; here it was a seed like any other."""

    def wrote(seed: int) -> str:
        return served.chat(model="skydraft-edge", seed=seed, temperature=1.5).json()["choices"][0]["message"]["content"]

    assert wrote(7) == wrote(7)
    assert len({wrote(-1) for _ in range(4)}) > 1


def test_a_temperature_too_low_to_divide_by_is_none(served: Running) -> None:
    answers = [served.chat(temperature=temperature) for temperature in (0, 1e-9, 9e-7)]
    assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1


@pytest.mark.parametrize("content", ["", "\n", None, [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_an_empty_message_is_taken(served: Running, role: str, content: Any) -> None:
    """An interrupted turn or an empty file: other servers take it, and a conversation that has one can go on."""
    messages = [*ASKED, {"role": role, "content": content, "tool_call_id": "1"}]
    assert served.chat(messages).status_code == 200
    if role == "user" and isinstance(content, str) and content:
        assert served.chat([{"role": role, "content": content}]).status_code == 200


@pytest.mark.parametrize(("prompt", "status"), [("\n", 200), ([""], 400), (["a", " "], 200), ([], 400), ([[]], 400)])
def test_a_blank_prompt_is_one_and_no_token_is_none(served: Running, prompt: Any, status: int) -> None:
    answer = post(served, "text", prompt=prompt)
    assert answer.status_code == status
    if status == 400:
        assert refused(answer)[1].startswith("prompt")


@pytest.mark.parametrize("mode", ["edge", "cloud", "lossless", "quality"])
def test_no_answer_ends_before_min_tokens(mode: str) -> None:
    model = open_toy("toy", 4096, 6)
    end = next(iter(model.vocab.end_ids))
    with gateway(Pair(open_toy("toy:drift=0.2", 4096, 6), model)) as served:

        def length(**more: Any) -> int:
            bias = {str(end): 30}
            body = served.chat(model=f"skydraft-{mode}", max_tokens=60, logit_bias=bias, **more).json()
            return int(body["usage"]["completion_tokens"])

        assert length() < 40 <= length(min_tokens=40)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stop_token_ids_end_a_text_as_end_tokens_do(served: Running, temperature: float) -> None:
    """Alike in all modes that give the target's text, and not before `min_tokens`."""
    more: dict[str, Any] = {"seed": 3, "temperature": temperature, "max_tokens": 24, "skydraft": {"token_ids": True}}

    def wrote(mode: str, **options: Any) -> tuple[list[int], str]:
        body = served.chat(model=f"skydraft-{mode}", **more, **options).json()
        return body["skydraft"]["token_ids"], body["choices"][0]["finish_reason"]

    whole, _ = wrote("cloud")
    for at in (0, 3, 11):
        first = whole.index(whole[at])
        for mode in ("cloud", "lossless"):
            assert wrote(mode, stop_token_ids=[whole[at]]) == (whole[: first + 1], "stop")
    ids, _ = wrote("lossless", stop_token_ids=[whole[0]], min_tokens=6)
    assert len(ids) >= 6 and ids == wrote("cloud", stop_token_ids=[whole[0]], min_tokens=6)[0]


def test_a_stop_token_outside_the_vocabulary_is_refused(served: Running) -> None:
    """It crashed whole engines of vLLM."""
    for ids, mode in itertools.product(([10**6], [-1], [2**40]), ("edge", "cloud")):
        status, param, _ = refused(post(served, "chat", stop_token_ids=ids, model=f"skydraft-{mode}"))
        assert status == 400 and param.startswith("stop_token_ids")


def test_an_argument_that_the_chat_template_reads_is_refused_by_name(served: Running) -> None:
    """The toy's template reads `tools` and `messages`."""
    status, param, _ = refused(post(served, "chat", chat_template_kwargs={"a": 1, "tools": []}))
    assert (status, param) == (400, "chat_template_kwargs.tools")


def test_a_salt_keeps_what_was_read_apart() -> None:
    """vLLM's field against guessing what others asked: the time or `cached_tokens` would tell."""
    with gateway() as served:

        def cached(salt: str | None) -> int:
            usage = served.chat("语" * 1200, model="skydraft-edge", cache_salt=salt).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("a") == 0 < cached("a")
        assert cached("b") == cached(None) == 0


def test_a_byte_order_mark_before_a_body_is_dropped(served: Running) -> None:
    body = json.dumps({"model": "skydraft-edge", "max_tokens": 2} | CHAT[1]).encode()
    for data in (body, b"\xef\xbb\xbf" + body):
        assert httpx.post(f"{served.v1}/chat/completions", content=data, timeout=PATIENCE_S).status_code == 200


WRONG = {
    "17 stop strings": ("chat", {"stop": [str(number) for number in range(17)]}, "stop", "16"),
    "a long stop string": ("chat", {"stop": "a" * 300}, "stop", "256"),
    "stop strings in messages": ("messages", {"stop_sequences": ["a"] * 17}, "stop_sequences", "16"),
    "no input": ("responses", {"input": []}, "input", "1"),
    "only thoughts": ("responses", {"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input", ""),
    "no messages": ("chat", {"messages": []}, "messages", "1"),
    "no messages for Anthropic": ("messages", {"messages": []}, "messages", "1"),
    "a number in the input": ("responses", {"input": 5}, "input", ""),
    "a role": ("chat", {"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role", "user"),
    "a content": ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", ""),
    "a part": ("chat", {"messages": [{"role": "user", "content": [5]}]}, "messages.0.content.0", ""),
    "a prompt": ("text", {"prompt": 5}, "prompt.0", ""),
    "a prompt of halves": ("text", {"prompt": [5.5]}, "prompt.0", ""),
    "nine prompts": ("text", {"prompt": ["a"] * 9}, "prompt", "8"),
    "a limit": ("chat", {"max_tokens": 0}, "max_tokens", "1"),
    "a limit of a response": ("responses", {"max_output_tokens": 0}, "max_output_tokens", "1"),
    "a name of a tool": ("responses", {"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", ""),
    "a name of Anthropic's": ("messages", {"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", ""),
    "a named tool": ("responses", {"tool_choice": {"type": "function", "name": "a"}}, "tool_choice", "a"),
    "a format": ("responses", {"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", ""),
    "a schema": (
        "responses", {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "nothing"}}}},
        "text.format", "",
    ),
    "a long input": ("responses", {"input": "语" * 30_000}, "input", "context"),
    "a long prompt": ("text", {"prompt": "语" * 30_000}, "prompt", "context"),
    "a temperature": ("chat", {"temperature": "hot"}, "temperature", "number"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_refusal_names_the_clients_own_field(served: Running, name: str) -> None:
    interface, fields, param, says = WRONG[name]
    status, told, message = refused(post(served, interface, **fields))
    assert (status, told) == (400, param) and says in message, message
