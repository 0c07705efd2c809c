"""Every bad request gets one error object that names the parameter, and the next request works."""

from __future__ import annotations

import gzip
import json
from typing import Any, get_args, get_type_hints

import httpx
import pytest
from http_fixtures import local_app
from openai.types import completion_create_params
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionMessageParam,
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat import completion_create_params as chat_completion_create_params

from nybble.service.text import TextCodec

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]

INVALID, UNSUPPORTED, UNKNOWN = "invalid_value", "unsupported_parameter", "unknown_parameter"

# body of /v1/completions -> param, code
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "prompt", "missing_parameter"),
    ({"prompt": "x", "banana": 1}, "banana", UNKNOWN),
    ({"prompt": "x", "min_tokens": 5}, "min_tokens", UNSUPPORTED),
    ({"prompt": "x", "skip_special_tokens": False}, "skip_special_tokens", UNSUPPORTED),
    ({"prompt": "x", "": 1}, "", UNKNOWN),
    ({"prompt": None}, "prompt", INVALID),
    ({"prompt": ""}, "prompt", INVALID),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": ["x", ""]}, "prompt", INVALID),
    ({"prompt": [[]]}, "prompt", INVALID),
    ({"prompt": ["x", 1]}, "prompt", INVALID),
    ({"prompt": [1, True]}, "prompt", INVALID),
    ({"prompt": [1.5]}, "prompt", INVALID),
    ({"prompt": {"a": 1}}, "prompt", INVALID),
    ({"prompt": ["x"] * 1025}, "prompt", INVALID),
    ({"prompt": [-1]}, "prompt", INVALID),
    ({"prompt": [512]}, "prompt", INVALID),
    ({"prompt": [10**30]}, "prompt", INVALID),
    ({"prompt": [10**30], "echo": True}, "prompt", INVALID),
    ({"prompt": "Hello " * 300}, "prompt", "context_length_exceeded"),
    ({"prompt": "Hello " * 30_000}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 4_000_000}, "prompt", "context_length_exceeded"),
    ({"prompt": [100] * 256}, "prompt", "context_length_exceeded"),
    ({"prompt": "x", "model": "gpt-4"}, "model", "model_not_found"),
    ({"prompt": "x", "model": 5}, "model", INVALID),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", INVALID),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", INVALID),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", INVALID),
    ({"prompt": "x", "max_tokens": 5.5}, "max_tokens", INVALID),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", INVALID),
    ({"prompt": "x", "max_tokens": 10**40}, "max_tokens", INVALID),
    ({"prompt": "x", "n": 0}, "n", INVALID),
    ({"prompt": "x", "n": 129}, "n", INVALID),
    ({"prompt": ["x"] * 3, "n": 100}, "n", INVALID),
    ({"prompt": "x", "temperature": "hot"}, "temperature", INVALID),
    ({"prompt": "x", "temperature": -0.1}, "temperature", INVALID),
    ({"prompt": "x", "temperature": 2.1}, "temperature", INVALID),
    ({"prompt": "x", "temperature": float("nan")}, "temperature", INVALID),
    ({"prompt": "x", "temperature": float("inf")}, "temperature", INVALID),
    ({"prompt": "x", "top_p": float("nan")}, "top_p", INVALID),
    ({"prompt": "x", "top_p": 1.1}, "top_p", INVALID),
    ({"prompt": "x", "top_k": -2}, "top_k", INVALID),
    ({"prompt": "x", "min_p": 1.5}, "min_p", INVALID),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"prompt": "x", "repetition_penalty": 1e-300}, "repetition_penalty", INVALID),
    ({"prompt": "x", "repetition_penalty": 1001}, "repetition_penalty", INVALID),
    ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", INVALID),
    ({"prompt": "x", "frequency_penalty": float("-inf")}, "frequency_penalty", INVALID),
    ({"prompt": "x", "seed": 2**63}, "seed", INVALID),
    ({"prompt": "x", "seed": 1.0}, "seed", INVALID),
    ({"prompt": "x", "stop": ["x"] * 17}, "stop", INVALID),
    ({"prompt": "x", "stop": ""}, "stop", INVALID),
    ({"prompt": "x", "stop": [5]}, "stop", INVALID),
    ({"prompt": "x", "stop": "x" * 2000}, "stop", INVALID),
    ({"prompt": "x", "stop_token_ids": [512]}, "stop_token_ids", INVALID),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids[0]", INVALID),
    ({"prompt": "x", "stop_token_ids": ["a"]}, "stop_token_ids[0]", INVALID),
    ({"prompt": "x", "logprobs": 21}, "logprobs", INVALID),
    ({"prompt": "x", "logprobs": True}, "logprobs", INVALID),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": {"5": float("nan")}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": {"512": 1}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": {"\u0665": 1}}, "logit_bias", INVALID),
    ({"prompt": "x", "logit_bias": [1]}, "logit_bias", INVALID),
    ({"prompt": "x", "stream": "yes"}, "stream", INVALID),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"prompt": "x", "stream": True, "stream_options": {"x": 1}}, "stream_options.x", UNKNOWN),
    ({"prompt": "x", "best_of": 0}, "best_of", INVALID),
    ({"prompt": "x", "best_of": 129}, "best_of", INVALID),
    ({"prompt": "x", "best_of": 2, "n": 3}, "best_of", INVALID),
    ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", INVALID),
    ({"prompt": ["x"] * 3, "best_of": 100}, "best_of", INVALID),
    ({"prompt": "x", "priority": 2**31}, "priority", INVALID),
    ({"prompt": "x", "priority": "high"}, "priority", INVALID),
    ({"prompt": "x", "cache_salt": ""}, "cache_salt", INVALID),
    ({"prompt": "x", "cache_salt": 7}, "cache_salt", INVALID),
    ({"prompt": "x", "cache_salt": "s" * 257}, "cache_salt", INVALID),
    ({"prompt": "x", "timeout_s": 0}, "timeout_s", INVALID),
    ({"prompt": "x", "timeout_s": float("inf")}, "timeout_s", INVALID),
    ({"prompt": "x", "suffix": "y"}, "suffix", UNSUPPORTED),
    ({"prompt": "x", "messages": USER}, "messages", UNKNOWN),
]

BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "messages", "missing_parameter"),
    ({"messages": []}, "messages", INVALID),
    ({"messages": "hi"}, "messages", INVALID),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_parameter"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", INVALID),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", UNSUPPORTED),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", INVALID),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", INVALID),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        UNSUPPORTED,
    ),
    ({"messages": [*USER, {"role": "user", "content": "x", "mood": 1}]}, "messages[1].mood", UNKNOWN),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
        "messages[0].tool_calls",
        UNSUPPORTED,
    ),
    ({"messages": [{"role": "user", "content": "Hello " * 300}]}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "x" * 4_000_000}]}, "messages", "context_length_exceeded"),
    ({"messages": USER, "prompt": "x"}, "prompt", UNKNOWN),
    ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", INVALID),
    ({"messages": USER, "top_logprobs": 3}, "top_logprobs", INVALID),
    ({"messages": USER, "logprobs": 1}, "logprobs", INVALID),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools", UNSUPPORTED),
    ({"messages": USER, "tool_choice": "required"}, "tool_choice", UNSUPPORTED),
    ({"messages": USER, "response_format": {"type": "json_object"}}, "response_format", UNSUPPORTED),
    ({"messages": USER, "modalities": ["audio"]}, "modalities", UNSUPPORTED),
    ({"messages": USER, "audio": {"voice": "x"}}, "audio", UNSUPPORTED),
    ({"messages": USER, "store": True}, "store", UNSUPPORTED),
    ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort", UNSUPPORTED),
    ({"messages": USER, "web_search_options": {}}, "web_search_options", UNSUPPORTED),
    ({"messages": USER, "service_tier": "flex"}, "service_tier", UNSUPPORTED),
    ({"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", INVALID),
]

BAD_TOKENS: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("/tokenize", {}, "prompt", INVALID),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt", INVALID),
    ("/tokenize", {"prompt": 5}, "prompt", INVALID),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt", INVALID),
    ("/tokenize", {"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs", INVALID),
    ("/tokenize", {"prompt": "x", "model": "gpt-4"}, "model", "model_not_found"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "missing_parameter"),
    (
        "/tokenize",
        {"messages": USER, "chat_template_kwargs": {"tokenize": 1}},
        "chat_template_kwargs",
        INVALID,
    ),
    ("/tokenize", {"prompt": "x", "banana": 1}, "banana", UNKNOWN),
    ("/detokenize", {}, "tokens", "missing_parameter"),
    ("/detokenize", {"tokens": "x"}, "tokens", INVALID),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", INVALID),
    ("/detokenize", {"tokens": [512]}, "tokens", INVALID),
    ("/detokenize", {"tokens": [True]}, "tokens[0]", INVALID),
]

CASES = (
    [(COMPLETIONS, *case) for case in BAD_COMPLETIONS] + [(CHAT, *case) for case in BAD_CHATS] + BAD_TOKENS
)


def name_of(value: Any) -> str | None:
    return json.dumps(value)[:60] if isinstance(value, dict) else None


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, which has the one form that all errors have."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and 0 < len(error["message"]) < 700
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    return error


@pytest.mark.parametrize(("path", "body", "param", "code"), CASES, ids=name_of)
def test_a_bad_body(
    http: httpx.Client, path: str, body: dict[str, Any], param: str | None, code: str
) -> None:
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = check_error(response, 404 if code == "model_not_found" else 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1}).status_code == 200


# As vLLM's and SGLang's routers fill them in.
ROUTERS = {
    "no_stop_trim": False,
    "return_hidden_states": False,
    "skip_special_tokens": True,
    "min_tokens": 0,
    "length_penalty": 1.0,
    "use_beam_search": False,
    "include_stop_str_in_output": False,
}
NEUTRAL = {
    CHAT: ROUTERS
    | {
        "continue_final_message": False,
        "add_generation_prompt": True,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
        "tools": [],
        "tool_choice": "auto",
        "functions": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "audio": None,
        "stream_options": None,
    },
    COMPLETIONS: ROUTERS
    | {"best_of": 1, "suffix": "", "top_k": -1, "logit_bias": {}, "stop": [], "priority": 0},
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_values_that_change_nothing_are_accepted(http: httpx.Client, path: str) -> None:
    body = NEUTRAL[path] | ({"messages": USER} if path == CHAT else {"prompt": "x"}) | {"max_tokens": 1}
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_value"),
        (b"{", "invalid_json"),
        (b'{"prompt": "\xff"}', "invalid_json"),
        (b"[1]", "invalid_value"),
        (b'"prompt"', "invalid_value"),
        (b"null", "invalid_value"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\n"}', "invalid_json"),
    ],
    ids=[
        "empty",
        "cut",
        "not text",
        "a list",
        "a string",
        "null",
        "nested deeply",
        "a number of many digits",
        "control character",
    ],
)
def test_what_is_no_json_object(http: httpx.Client, content: bytes, code: str) -> None:
    response = http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    error = check_error(response, 400)
    assert error["code"] == code
    assert error["message"].startswith("the body ") and " at at " not in error["message"]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        (COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": "x", "stop": "\\ud800"}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}'),
        (COMPLETIONS, b'{"prompt": "x", "\\ud800": 1}'),
    ],
)
def test_a_lone_surrogate_is_refused(http: httpx.Client, path: str, content: bytes) -> None:
    check_error(http.post(path, content=content, headers={"Content-Type": "application/json"}), 400)


@pytest.mark.parametrize(
    "body",
    [{"prompt": "x", "stop": ["y" * 5000]}, {"prompt": "x", "n": "z" * 5000}, {"prompt": "x", "w" * 5000: 1}],
    ids=["value", "wrong type", "name"],
)
def test_long_input_is_not_echoed(http: httpx.Client, body: dict[str, Any]) -> None:
    assert len(http.post(COMPLETIONS, json=body).text) < 600


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/" + "x" * 3000, 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("GET", "/livez/", 404, "not_found"),
        ("POST", COMPLETIONS + "/", 404, "not_found"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-4", 404, "model_not_found"),
    ],
    ids=[
        "unknown route",
        "long unknown route",
        "wrong method",
        "slash after a path",
        "and after that of a POST",
        "wrong method on models",
        "unknown model",
    ],
)
def test_routes(http: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    error = check_error(http.request(method, path), status)
    assert error["code"] == code and len(error["message"]) < 250


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Content-Encoding", "gzip"),
        ("Content-Encoding", "br"),
        ("Transfer-Encoding", "gzip, chunked"),
    ],
)
async def test_a_body_that_is_packed_is_refused_by_the_headers_name(
    codec: TextCodec, header: str, value: str
) -> None:
    async with local_app(codec) as local:
        body = gzip.compress(b'{"prompt": "x"}')
        error = check_error(await local.http.post(COMPLETIONS, content=body, headers={header: value}), 400)
        assert error["param"] == header.lower() and value in error["message"]
        plain = await local.http.post(
            COMPLETIONS, json={"prompt": "x"}, headers={"Content-Encoding": "identity"}
        )
        assert plain.status_code == 200


# What works, with a value that is none of the defaults; where two go together, both.
WORKS: dict[str, dict[str, dict[str, Any]]] = {
    COMPLETIONS: {
        "best_of": {"best_of": 2},
        "echo": {"echo": True},
        "frequency_penalty": {"frequency_penalty": 0.5},
        "logit_bias": {"logit_bias": {"5": -3}},
        "logprobs": {"logprobs": 2},
        "max_tokens": {"max_tokens": 3},
        "model": {"model": "tiny"},
        "n": {"n": 2},
        "presence_penalty": {"presence_penalty": 0.5},
        "prompt": {"prompt": ["x", "y"]},
        "seed": {"seed": 3},
        "stop": {"stop": ["z"]},
        "stream": {"stream": True},
        "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
        "temperature": {"temperature": 0.5},
        "top_p": {"top_p": 0.5},
        "user": {"user": "u"},
    },
}
WORKS[CHAT] = {
    **{
        name: given for name, given in WORKS[COMPLETIONS].items() if name not in ("best_of", "echo", "prompt")
    },
    "logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "messages": {"messages": [{"role": "developer", "content": "x"}, *USER]},
    "prompt_cache_key": {"prompt_cache_key": "k"},
    "safety_identifier": {"safety_identifier": "s"},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
}


@pytest.mark.parametrize(
    ("path", "params"),
    [(COMPLETIONS, completion_create_params), (CHAT, chat_completion_create_params)],
    ids=["completions", "chat"],
)
def test_every_parameter_of_the_openai_client_works_or_is_refused_by_name(
    http: httpx.Client, path: str, params: Any
) -> None:
    """Whatever version of it is installed: one that adds a parameter shows here that nobody has thought of it."""
    names = set(params.CompletionCreateParamsBase.__annotations__) | {"stream"}
    body = {"messages": USER} if path == CHAT else {"prompt": "x"}
    assert set(WORKS[path]) <= names
    for name in sorted(names):
        if name in WORKS[path]:
            assert http.post(path, json=body | {"max_tokens": 2} | WORKS[path][name]).status_code == 200, name
        else:
            error = check_error(http.post(path, json=body | {name: {"x": 1}}), 400)
            assert (error["param"], error["code"]) == (name, UNSUPPORTED)


@pytest.mark.parametrize("form", get_args(ChatCompletionMessageParam), ids=lambda form: form.__name__)
def test_every_part_of_the_openai_clients_messages_works_or_is_refused_by_name(
    http: httpx.Client, form: Any
) -> None:
    (role,) = get_args(get_type_hints(form)["role"])
    message = {"role": role, "content": "x"}
    response = http.post(CHAT, json={"messages": [message], "max_tokens": 1})
    if role in ("tool", "function"):
        error = check_error(response, 400)
        assert (error["param"], error["code"]) == ("messages[0].role", UNSUPPORTED)
        return
    assert response.status_code == 200
    for name in set(form.__annotations__) - {"role", "content"}:
        error = check_error(http.post(CHAT, json={"messages": [message | {name: "x"}]}), 400)
        assert (error["param"], error["code"]) == (f"messages[0].{name}", UNSUPPORTED)


def test_every_part_of_the_openai_clients_contents_and_stream_options_works_or_is_refused_by_name(
    http: httpx.Client,
) -> None:
    for form in get_args(ChatCompletionContentPartParam):
        (kind,) = get_args(get_type_hints(form)["type"])
        part = {"type": kind} | ({"text": "x"} if kind == "text" else {kind: {}})
        response = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}], "max_tokens": 1})
        if kind == "text":
            assert response.status_code == 200
        else:
            error = check_error(response, 400)
            assert (error["param"], error["code"]) == ("messages[0].content", UNSUPPORTED)
            assert repr(kind) in error["message"]
    for name in set(ChatCompletionContentPartTextParam.__annotations__) - {"type", "text"}:
        part = {"type": "text", "text": "x", name: {}}
        error = check_error(http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]}), 400)
        assert error["code"] == UNSUPPORTED and repr(name) in error["message"]
    for name in set(ChatCompletionStreamOptionsParam.__annotations__) - {"include_usage"}:
        body = {"messages": USER, "stream": True, "stream_options": {name: True}}
        error = check_error(http.post(CHAT, json=body), 400)
        assert (error["param"], error["code"]) == (f"stream_options.{name}", UNSUPPORTED)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"prompt": "x", "max_tokens": 1, "max_tokens": 2}', "max_tokens"),
        ('{"prompt": "x", "logit_bias": {"1": 2, "1": 3}}', "1"),
    ],
)
def test_a_key_that_comes_twice_is_named(http: httpx.Client, body: str, key: str) -> None:
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, key, INVALID)
    assert f"{key!r} 2 times" in error["message"]


def test_a_key_that_is_no_text_is_unknown(http: httpx.Client) -> None:
    body = '{"prompt": "x", "\\ud800": 1}'
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, UNKNOWN)


@pytest.mark.parametrize("depth", [33, 400])
def test_template_variables_that_are_too_deep_are_named(http: httpx.Client, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    response = http.post(CHAT, json={"messages": USER, "chat_template_kwargs": {"x": value}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_a_name_that_the_template_leaves_out_is_refused(http: httpx.Client) -> None:
    messages = [*USER, {"role": "user", "content": "x", "name": "eve"}]
    for path in (CHAT, "/tokenize"):
        error = http.post(path, json={"messages": messages}).json()["error"]
        assert (error["param"], error["code"]) == ("messages[1].name", UNSUPPORTED)
