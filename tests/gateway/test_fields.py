"""Fields of the requests of OpenAI, Anthropic, vLLM, SGLang and llama-server: followed, refused by name or harmless."""

import json
from typing import Any, get_type_hints

import httpx2 as httpx
import pytest

from skydraft.engines.toy import open_toy
from skydraft.gateway.pair import Pair
from skydraft.gateway.refusals import NOT_SERVED, Refusal
from skydraft.gateway.schema import read_ask

from ..later import later
from .interfaces import ALL_WHOLE, KINDS, WHOLE, forced, num_read, plain, tool_of
from .interfaces import QUESTION as ASKED
from .running import Running, gateway, written_by

chats = later("openai.types.chat.completion_create_params")
texts = later("openai.types.completion_create_params")
responses = later("openai.types.responses.response_create_params")

CHAT = "chat/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

# What other tests show to have an effect; the value is taken.
FOLLOWED: dict[str, Any] = {
    "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "max_tokens": 2, "min_tokens": 1, "model": "skydraft-edge",
    "presence_penalty": 0.5, "repetition_penalty": 1.1, "seed": 4, "stop": ["x"], "stop_token_ids": [5],
    "reasoning_effort": "low", "stream": False, "stream_options": {"include_usage": True}, "temperature": 0.5,
    "top_k": 3, "top_p": 0.5, "min_p": 0.1, "cache_salt": "a", "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False, "reasoning": {"effort": "low"}, "thinking": {"type": "adaptive"},
}  # fmt: skip
FOLLOWED_IN: dict[str, dict[str, Any]] = {
    "chat/completions": {
        "continue_final_message": False, "logprobs": True, "max_completion_tokens": 2, "messages": ASKED, "n": 2,
        "parallel_tool_calls": False, "response_format": {"type": "text"}, "tool_choice": "none", "tools": [TOOL],
        "top_logprobs": 0, "prediction": {"type": "content", "content": "a"},
    },
    "completions": {"best_of": 1, "echo": True, "logprobs": 1, "n": 2, "prompt": "a"},
    "responses": {
        "input": "a", "instructions": "b", "max_output_tokens": 2, "parallel_tool_calls": False,
        "text": {"format": {"type": "text"}}, "tool_choice": "none", "tools": [], "metadata": {"a": "b"},
    },
    "messages": {"max_tokens": 2, "messages": ASKED, "stop_sequences": ["x"], "system": "b",
                 "tool_choice": {"type": "none"}, "tools": [], "output_config": {"effort": "low"}},
}  # fmt: skip
# Hints, names and figures, of any value: no word of the answer depends on them, or what they ask for is done anyway.
HARMLESS = """
    access_programs background_options context_management image include max_tool_calls metadata
    moderation prompt_cache_key prompt_cache_options prompt_cache_retention safety_identifier service_tier store
    top_logprobs truncation user verbosity web_search_options cache_control inference_geo betas length_penalty
    priority keep_alive mirostat
"""
REFUSED = sorted(NOT_SERVED)  # by name with any value, and taken where it asks for nothing
_JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}
REFUSED_IN: dict[str, dict[str, Any]] = {
    "chat/completions": {}, "completions": {**_JSON, "best_of": 2, "top_logprobs": 1},
    "responses": {"max_completion_tokens": 2, "max_tokens": 2, "prompt": {"id": "a"}, **_JSON},
    "messages": {"max_completion_tokens": 2, **_JSON, "stop": ["a"]},
}  # fmt: skip


def post(served: Running, path: str, **fields: Any) -> httpx.Response:
    return served.post(path, **plain(path, limit=2, model="skydraft-edge") | fields)


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_harmless_fields_and_those_that_ask_for_nothing_are_taken(served: Running, path: str) -> None:
    fields = dict.fromkeys(HARMLESS.split(), "a") | FOLLOWED
    fields = {name: value for name, value in fields.items() if name not in REFUSED_IN[path]} | FOLLOWED_IN[path]
    empty = [dict.fromkeys(REFUSED, value) for value in (None, 0, "", [], "none")]
    for body in (fields, dict.fromkeys(fields.keys() - plain(path)), *empty):
        answer = post(served, path, **body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ALL_WHOLE)
def test_fields_that_are_not_served_are_refused_by_name(path: str) -> None:
    for name, value in (dict.fromkeys(REFUSED, "x") | REFUSED_IN[path]).items():
        with pytest.raises(Refusal) as caught:
            read_ask(json.dumps(plain(path, **{name: value})).encode(), KINDS[path].reads)
        refusal = caught.value
        assert (refusal.status, refusal.param) == (400, name) and refusal.message.startswith(f"{name}: ")


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
def test_every_field_of_the_sdk_is_in_a_table(path: str) -> None:
    module = {"chat/completions": chats, "completions": texts, "responses": responses}[path]
    kind = getattr(module, f"{'Response' if path == 'responses' else 'Completion'}CreateParamsBase")
    known = {*FOLLOWED, *FOLLOWED_IN[path], *HARMLESS.split(), *REFUSED, *REFUSED_IN[path]}
    assert get_type_hints(kind).keys() <= known


def test_a_seed_of_minus_one_is_random(served: Running) -> None:
    """So it is for llama-server and vLLM; here it was a seed like any other."""

    def wrote(seed: int) -> str:
        return served.chat(model="skydraft-edge", seed=seed, temperature=1.5).json()["choices"][0]["message"]["content"]

    assert wrote(7) == wrote(7)
    assert len({wrote(-1) for _ in range(4)}) > 1


@pytest.mark.parametrize("content", ["", "\n", None, [], [{"type": "text", "text": ""}]])
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_an_empty_message_is_taken(served: Running, role: str, content: Any) -> None:
    """An interrupted turn or an empty file: other servers take it, and a conversation that has one can go on."""
    assert served.chat([*ASKED, {"role": role, "content": content, "tool_call_id": "1"}]).status_code == 200


def test_a_blank_text_is_one(served: Running) -> None:
    assert served.chat([{"role": "user", "content": "\n"}]).status_code == 200
    assert all(post(served, "completions", prompt=prompt).status_code == 200 for prompt in ("\n", ["a", " "]))


def test_stop_token_ids_end_a_text_as_end_tokens_do_and_not_before_min_tokens(served: Running) -> None:
    """That modes agree on it is a law of decoding."""

    def wrote(**options: Any) -> tuple[list[int], str]:
        body = served.chat(model="skydraft-lossless", max_tokens=24, skydraft={"token_ids": True}, **options).json()
        return body["skydraft"]["token_ids"], body["choices"][0]["finish_reason"]

    whole, _ = wrote()
    assert wrote(stop_token_ids=[whole[3]]) == (whole[: whole.index(whole[3]) + 1], "stop")
    assert len(wrote(stop_token_ids=[whole[0]], min_tokens=6)[0]) >= 6


@pytest.mark.parametrize("path", WHOLE)
def test_agents_with_many_tools_and_long_names_are_answered(path: str) -> None:
    """Servers of tools add up, and Anthropic's names may have 128 characters."""
    tools = [tool_of(path, f"mcp__{number:0>123}", {}) for number in range(300)]
    tools = [{"type": "namespace", "name": "a", "tools": tools}] if path == "responses" else tools
    with gateway(Pair(open_toy("toy", 2**17, 2))) as served:
        answer = served.post(path, **plain(path, limit=2, model="skydraft", tools=tools))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("calls", [[], None])
def test_an_answer_without_calls_has_none_for_the_template(calls: Any) -> None:
    """Some clients always send the list, and Llama's template refuses one that has not exactly one call."""
    one_call = "{% for m in messages if m.tool_calls is defined %}{{ raise_exception('one call') }}{% endfor %}"
    with written_by(one_call + "{{ messages[-1].content }}") as served:
        messages = [*ASKED, {"role": "assistant", "content": "a", "tool_calls": calls}, *ASKED]
        assert served.chat(messages).status_code == 200


def test_a_call_without_arguments_may_be_written_in_any_way(served: Running) -> None:
    def count(**arguments: Any) -> int:
        call = {"id": "1", "type": "function", "function": {"name": "f", **arguments}}
        turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "a"}]
        return num_read(served, CHAT, plain(CHAT, messages=[*ASKED, *turns], tools=[TOOL]))

    assert count() == count(arguments=None) == count(arguments="") == count(arguments="{}") == count(arguments={})


def test_a_salt_or_a_key_keeps_what_was_read_apart() -> None:
    """vLLM's field against guessing what others asked: the time or `cached_tokens` would tell."""
    with gateway(authorize={"Bearer a": "ann", "Bearer b": "bob"}.__getitem__) as served:

        def cached(key: str, salt: str | None) -> int:
            body = plain("chat/completions", "语" * 1200, model="skydraft-edge", cache_salt=salt)
            headers = {"Authorization": f"Bearer {key}"}
            usage = served.client.post(f"{served.v1}/chat/completions", json=body, headers=headers).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached("a", "x") == 0 < cached("a", "x")
        assert cached("a", "y") == cached("a", None) == cached("b", "x") == 0


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def must(**function: Any) -> dict[str, Any]:
    return {"tools": [tool("f", **function)], "tool_choice": "required"}


def fitting(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def ours(**fields: Any) -> dict[str, Any]:
    return {"skydraft": fields}


WEB: Any = {"type": "web_search"}
CALL, FLAT = {"function": {"name": "f"}}, {"type": "function", "name": "f" * 60}
# Takes the second that it may take.
SLOW = {"type": "string", "allOf": [{"pattern": f".*{number}.*"} for number in range(40)]}
NOT_JSON = {"type": "json_object", "schema": {"enum": []}}
# An interface, its fields, the field that the error names, and a word of it.
WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"temperature": 3}, "temperature", ""),
    (CHAT, {"continue_final_message": True}, "", "assistant"),
    (CHAT, {"logit_bias": {"99999": 1}}, "", "no id"),
    (CHAT, ours(gate="entropy"), "", "gate"),
    (CHAT, ours(max_new_tokens=3), "skydraft.max_new_tokens", "not permitted"),
    (CHAT, {"tools": [tool("time")], "tool_choice": tool("f")}, "tool_choice", "function"),
    (CHAT, {"tools": [tool("time")], "tool_choice": "maybe"}, "tool_choice", ""),
    ("responses", {"tools": [WEB], "tool_choice": WEB}, "tool_choice.type", "'function'"),
    ("responses", {"tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice", ""),
    ("messages", {"tools": [WEB | {"name": "look"}], "tool_choice": {"type": "tool", "name": "look"}}, "tool_choice",
     "Other tools are not run here"),
    (CHAT, {"tools": [tool('a"b')]}, "tools.0.name", ""),
    ("responses", {"tools": [{"type": "namespace", "name": "a b", "tools": []}]}, "tools.0.name", ""),
    *((CHAT, {"tools": [each]}, "tools.0", "") for each in ({"type": 5}, 5, {})),
    (CHAT, must(parameters={"type": "string"}), "", "object"),
    (CHAT, must(parameters={"$ref": "#"}), "", ""),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    (CHAT, {"response_format": NOT_JSON}, "", ""),
    (CHAT, {"response_format": {"type": "json_object"}, **forced("a")}, "skydraft.grammar", ""),
    (CHAT, fitting({"enum": ["上" * 400_000]}), "", ""),
    (CHAT, fitting(SLOW), "", ""),
    (CHAT, ours(grammar="regex:(a"), "", ""),
    (CHAT, {"stop": [str(number) for number in range(17)]}, "stop", "16"),
    ("messages", {"stop_sequences": ["a"] * 17}, "stop_sequences", "16"),
    *((CHAT, {"stop_token_ids": [each]}, "stop_token_ids", "") for each in (10**6, -1, 2**40)),
    ("responses", {"input": []}, "input", "It is empty."),
    ("responses", {"input": [{"type": "function_call", "id": "1"}]}, "input.0.name", "required"),
    ("responses", {"input": [{"type": "reasoning", "id": "a", "summary": []}]}, "input", ""),
    ("responses", {"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "item_reference"),
    ("responses", {"input": [{"type": "mesage", "role": "user", "content": "a"}]}, "input.0", "mesage"),
    (CHAT, {"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role", "user"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 257}]}, "messages", "256"),
    ("responses", {"input": [{"type": "function_call", "name": "f"}] * 257}, "input", "256"),
    ("messages", {"messages": ASKED * 4097}, "messages", "4096 turns"),
    ("completions", {"prompt": [5, 99999], "echo": True}, "prompt", "487"),
    ("completions", {"prompt": ["a"] * 9}, "prompt", "8"),
    *(("completions", {"prompt": none}, "prompt", "") for none in ([""], [], [[]])),
    ("completions", {"prompt": "语" * 30_000}, "", "context"),
    (CHAT, {"prediction": {"type": "diff", "content": "a"}}, "prediction.type", ""),
    ("messages", {"output_config": {"effort": "huge"}}, "output_config.effort", "low"),
    (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", ""),
    *((CHAT, ours(continue_ids=ids), "skydraft.continue_ids", "") for ids in ([10**6], [-1])),
    *((CHAT, ours(continue_ids=ids), "", "") for ids in ([*open_toy("toy").vocab.end_ids], [5] * 5000)),
    (CHAT, ours(logprobs=21), "skydraft.logprobs", ""),
    (CHAT, ours(continue_ids=[5], grammar="regex:[0-9]{6}"), "", ""),
    (CHAT, ours(continue_ids=[5]) | {"tools": [TOOL]}, "skydraft.continue_ids", "tools"),
    ("completions", ours(continue_ids=[5]), "skydraft.continue_ids", "completions"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_what_cannot_be_followed_is_refused_with_the_clients_name_of_the_field(served: Running, case: int) -> None:
    path, fields, param, says = WRONG[case]
    answer = served.post(path, **plain(path, limit=40, model="skydraft-lossless", stream=case % 2 > 0) | fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
    told = error.get("param") or error["message"].partition(":")[0]
    assert told.startswith(param), answer.text
    assert says in error["message"] and "\n" not in error["message"] and "skydraft/" not in error["message"]
