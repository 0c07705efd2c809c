"""POST /v1/chat/completions against a server process over the fake engine, whose answers are known."""

from __future__ import annotations

import json
from typing import Any

import fake_engine
import httpx
import pytest
import tiny_tokenizer
from fake_engine import reply
from http_fixtures import local_app
from transformers import PreTrainedTokenizerFast

from nybble.service.text import TextCodec

USER = [{"role": "user", "content": "Hello 你好"}]


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={"messages": USER} | body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = http.post("/v1/chat/completions", json={"messages": USER, "stream": True} | body)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def prompt_ids(codec: TextCodec, messages: list[dict[str, str]]) -> tuple[int, ...]:
    return codec.encode(codec.render_chat(messages), add_special_tokens=False)


def test_a_whole_answer(http: httpx.Client, codec: TextCodec) -> None:
    answer = chat(http, max_tokens=6)
    ids = prompt_ids(codec, USER)
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": codec.decode(reply(ids, None, 6)),
            "refusal": None,
            "annotations": [],
        },
        "logprobs": None,
        "finish_reason": "length",
    }
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 6


def test_the_default_is_the_rest_of_the_context(http: httpx.Client) -> None:
    assert chat(http)["usage"]["total_tokens"] == fake_engine.MAX_MODEL_LEN


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit(http: httpx.Client, name: str) -> None:
    assert chat(http, **{name: 3})["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("messages", "same_as"),
    [
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
            id="text parts",
        ),
        pytest.param(
            [{"role": "developer", "content": "Be brief."}, *USER],
            [{"role": "system", "content": "Be brief."}, *USER],
            id="developer is system",
        ),
        pytest.param(
            [
                *USER,
                {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None},
            ],
            [*USER, {"role": "assistant", "content": "x"}],
            id="an answer sent back",
        ),
    ],
)
def test_messages(http: httpx.Client, codec: TextCodec, messages: Any, same_as: Any) -> None:
    answer = chat(http, messages=messages, max_tokens=2, return_token_ids=True)
    assert answer["prompt_token_ids"] == list(prompt_ids(codec, same_as))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 2, "seed": 3},
        {"stop": ["sist", "好"]},
        {"logprobs": True, "top_logprobs": 3},
        {"logprobs": True, "stop": "好"},
        {"return_token_ids": True},
    ],
    ids=str,
)
def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client, options: dict[str, Any]) -> None:
    whole = chat(http, max_tokens=30, **options)
    texts: dict[int, str] = {}
    roles: dict[int, int] = {}
    logprobs: dict[int, list[Any]] = {}
    token_ids: dict[int, list[int]] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks_of(http, max_tokens=30, **options):
        assert chunk["object"] == "chat.completion.chunk"
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in reasons, "nothing follows the end"
        roles[index] = roles.get(index, 0) + ("role" in choice["delta"])
        assert roles[index] == 1, "the role comes first and once"
        texts[index] = texts.get(index, "") + choice["delta"].get("content", "")
        logprobs.setdefault(index, []).extend((choice["logprobs"] or {}).get("content", []))
        token_ids.setdefault(index, []).extend(choice.get("token_ids", []))
        if choice["finish_reason"]:
            reasons[index] = choice["finish_reason"]
    for choice in whole["choices"]:
        index = choice["index"]
        assert (texts[index], reasons[index]) == (choice["message"]["content"], choice["finish_reason"])
        assert logprobs[index] == (choice["logprobs"] or {"content": []})["content"]
        assert token_ids[index] == choice.get("token_ids", [])
    assert len(reasons) == len(whole["choices"]) == options.get("n", 1)


def test_logprobs(http: httpx.Client, codec: TextCodec) -> None:
    (choice,) = chat(http, max_tokens=30, logprobs=True, top_logprobs=5)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 30
    assert bytes(b for token in content for b in token["bytes"]).decode() == choice["message"]["content"]
    for token in content:
        assert token["logprob"] == -0.25
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.5, -2.5, -9999.0, -9999.0]


def test_usage_in_a_stream(http: httpx.Client) -> None:
    chunks = chunks_of(http, max_tokens=4, n=2, stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 8


@pytest.mark.anyio
async def test_template_variables_reach_the_template() -> None:
    template = "{{ 'think' if enable_thinking else 'answer' }} {{ messages[0]['content'] }}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.byte_level())
    tokenizer.chat_template = template
    codec = TextCodec(tokenizer)
    async with local_app(codec) as local:
        for given, text in ((None, "answer Hello 你好"), ({"enable_thinking": True}, "think Hello 你好")):
            body = {"messages": USER, "chat_template_kwargs": given, "max_tokens": 1}
            response = await local.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            assert codec.decode(local.client.seen[-1].prompt) == text


@pytest.mark.anyio
async def test_without_a_template_chat_is_refused_and_completions_work() -> None:
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.byte_level()))
    async with local_app(codec) as local:
        refused = await local.http.post("/v1/chat/completions", json={"messages": USER})
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "no_chat_template"
        answer = await local.http.post("/v1/completions", json={"prompt": "Hello"})
        assert answer.status_code == 200


@pytest.mark.anyio
async def test_the_templates_own_refusal_is_a_bad_request() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.byte_level())
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    async with local_app(TextCodec(tokenizer)) as local:
        refused = await local.http.post("/v1/chat/completions", json={"messages": USER})
        assert refused.status_code == 400
        assert "roles must alternate" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["self", "conversations", "messages", "tokenize"])
def test_a_variable_of_the_renderers_own_is_refused_by_name(http: httpx.Client, name: str) -> None:
    refused = http.post("/v1/chat/completions", json={"messages": USER, "chat_template_kwargs": {name: 1}})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == f"the variable {name!r} cannot be set"


@pytest.mark.anyio
async def test_a_variable_that_is_no_text_is_a_bad_request() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.byte_level())
    tokenizer.chat_template = "{{ variable }}"
    async with local_app(TextCodec(tokenizer)) as local:
        body = {"messages": USER, "chat_template_kwargs": {"variable": "\ud800"}}
        headers = {"Content-Type": "application/json"}
        refused = await local.http.post("/v1/chat/completions", content=json.dumps(body), headers=headers)
        assert refused.status_code == 400


@pytest.mark.anyio
async def test_a_long_conversation_is_tokenised_in_a_thread(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        body = {"messages": [{"role": "user", "content": "Hello world " * 1000}]}
        refused = await local.http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
