"""POST /v1/completions against a server process over the fake engine, whose answers are known."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import tiny_tokenizer
from fake_engine import EOS_AFTER_5, MAX_MODEL_LEN, reply
from http_fixtures import local_app
from transformers import PreTrainedTokenizerFast

from nybble.service.api.generation import Choice, PromptTokens, prompt_entries
from nybble.service.engine.protocol import Request, SamplingParams, Token
from nybble.service.text import TextCodec, TextStream

TEXT = "Hello world, hello there! 🎉 你好"


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def stream(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with exactly one [DONE]."""
    response = http.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def expected_text(codec: TextCodec, prompt: str, count: int, seed: int | None = None) -> str:
    return codec.decode(reply(codec.encode(prompt), seed, count))


def test_a_whole_answer(http: httpx.Client, codec: TextCodec) -> None:
    answer = complete(http, model="tiny", prompt=TEXT, max_tokens=7)
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["system_fingerprint"].startswith("nybble-")
    assert answer["choices"] == [
        {"index": 0, "text": expected_text(codec, TEXT, 7), "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"] == {
        "prompt_tokens": len(codec.encode(TEXT)),
        "completion_tokens": 7,
        "total_tokens": len(codec.encode(TEXT)) + 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_sixteen_tokens_are_the_default(http: httpx.Client) -> None:
    assert complete(http, prompt="Hello")["usage"]["completion_tokens"] == 16


def test_max_tokens_never_passes_the_context(http: httpx.Client) -> None:
    answer = complete(http, prompt=[100] * (MAX_MODEL_LEN - 5), max_tokens=1000)
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["tiny", None])
def test_the_model_may_be_named_or_left_out(http: httpx.Client, path: str | None) -> None:
    assert complete(http, prompt="Hello", model=path)["model"] == "tiny"


def test_the_model_may_be_named_as_it_was_given(http: httpx.Client, model_folder) -> None:
    assert complete(http, prompt="Hello", model=str(model_folder))["model"] == "tiny"


def test_prompts_in_all_four_forms(http: httpx.Client, codec: TextCodec) -> None:
    ids = list(codec.encode(TEXT))
    text = expected_text(codec, TEXT, 4)
    for prompt, count in ((TEXT, 1), ([TEXT, TEXT], 2), (ids, 1), ([ids, ids, ids], 3)):
        choices = complete(http, prompt=prompt, max_tokens=4)["choices"]
        assert [(c["index"], c["text"]) for c in choices] == [(i, text) for i in range(count)]


@pytest.mark.parametrize("n", [1, 3])
def test_seeds_count_up_over_the_choices_of_a_prompt(http: httpx.Client, codec: TextCodec, n: int) -> None:
    answer = complete(http, prompt=[TEXT, "Hello"], n=n, seed=5, max_tokens=3)
    wanted = [expected_text(codec, p, 3, 5 + i) for p in (TEXT, "Hello") for i in range(n)]
    assert [c["text"] for c in answer["choices"]] == wanted
    assert answer["usage"]["prompt_tokens"] == len(codec.encode(TEXT)) + len(codec.encode("Hello"))
    assert answer["usage"]["completion_tokens"] == 3 * 2 * n


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n": 3, "seed": 1},
        {"echo": True},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 0, "n": 2, "return_token_ids": True},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"stop": ["o w", "好"]},
        {"stop": "there", "logprobs": 2},
        {"logprobs": 0},
        {"return_token_ids": True},
        {"stop": "好H", "return_token_ids": True},
    ],
    ids=str,
)
def test_a_stream_is_the_whole_answer_in_pieces(http: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": TEXT, "max_tokens": 60} | options
    whole = complete(http, **body)["choices"]
    streamed = [
        {
            "index": i,
            "text": "",
            "logprobs": None,
            "finish_reason": None,
            "token_ids": [],
            "prompt_token_ids": [],
        }
        for i in range(len(whole))
    ]
    for chunk in stream(http, **body):
        (choice,) = chunk["choices"]
        target = streamed[choice["index"]]
        assert target["finish_reason"] is None, "nothing follows the end"
        assert chunk["object"] == "text_completion" and "usage" not in chunk
        target["text"] += choice["text"]
        target["finish_reason"] = choice["finish_reason"]
        target["token_ids"] += choice.get("token_ids", [])
        target["prompt_token_ids"] += choice.get("prompt_token_ids", [])
        if choice["logprobs"]:
            target["logprobs"] = target["logprobs"] or {name: [] for name in choice["logprobs"]}
            for name, values in choice["logprobs"].items():
                target["logprobs"][name] += values
    if not options.get("return_token_ids"):
        for choice in streamed:
            del choice["token_ids"], choice["prompt_token_ids"]
    assert streamed == whole


def test_usage_in_a_stream(http: httpx.Client) -> None:
    chunks = stream(http, prompt="Hello", max_tokens=5, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == complete(http, prompt="Hello", max_tokens=5)["usage"]


def test_a_stream_has_the_headers_of_one(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"prompt": "Hello", "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


def test_echo(http: httpx.Client, codec: TextCodec) -> None:
    text = expected_text(codec, TEXT, 3)
    for prompt in (TEXT, list(codec.encode(TEXT))):
        assert complete(http, prompt=prompt, max_tokens=3, echo=True)["choices"][0]["text"] == TEXT + text


def test_a_stop_string_ends_the_answer_before_it(http: httpx.Client) -> None:
    choice = complete(http, prompt=TEXT, max_tokens=60, stop="there")["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("Hello world, hello ", "stop")


def test_a_stop_string_that_never_comes_changes_nothing(http: httpx.Client) -> None:
    plain = complete(http, prompt=TEXT, max_tokens=20)["choices"][0]
    assert complete(http, prompt=TEXT, max_tokens=20, stop=["你好x", "absent"])["choices"][0] == plain


def test_a_stop_token_has_no_text_but_is_counted(http: httpx.Client, codec: TextCodec) -> None:
    prompt = [EOS_AFTER_5, *codec.encode("abcdefghij")]
    answer = complete(http, prompt=prompt, max_tokens=10, logprobs=0, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == codec.decode(prompt[1:])[: len(choice["text"])] and len(choice["text"]) == 5
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 6
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert choice["logprobs"]["text_offset"][-1] == 5
    goes_on = complete(http, prompt=prompt, max_tokens=10, ignore_eos=True)["choices"][0]
    assert goes_on["finish_reason"] == "length"


def test_stop_token_ids(http: httpx.Client, codec: TextCodec) -> None:
    ids = codec.encode(TEXT)
    choice = complete(http, prompt=TEXT, max_tokens=60, stop_token_ids=[ids[2]])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (codec.decode(ids[:2]), "stop")


def test_logprobs(http: httpx.Client, codec: TextCodec) -> None:
    choice = complete(http, prompt=TEXT, max_tokens=30, logprobs=5)["choices"][0]
    logprobs = choice["logprobs"]
    assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert all(len(values) == 30 for values in logprobs.values())
    assert logprobs["token_logprobs"] == [-0.25] * 30
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"]), "the emoji is several tokens"
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        assert 5 <= len(top) <= 6 and top[token] in (-0.25, -0.5, -1.5, -2.5, -9999.0)
        assert min(top.values()) == -9999.0, "minus infinity has a finite stand-in"


def test_tokens_of_a_stop_string_have_no_logprobs(http: httpx.Client) -> None:
    choice = complete(http, prompt=TEXT, max_tokens=60, stop=" there", logprobs=0)["choices"][0]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"] == "Hello world, hello"


def test_a_token_that_is_partly_shown_has_one(http: httpx.Client) -> None:
    choice = complete(http, prompt=TEXT, max_tokens=60, stop="there", logprobs=0)["choices"][0]
    assert choice["text"] == "Hello world, hello "
    assert "".join(choice["logprobs"]["tokens"]) == "Hello world, hello there"


def test_identifiers_of_the_caller_have_no_effect(http: httpx.Client) -> None:
    plain = complete(http, prompt=TEXT)["choices"]
    assert (
        complete(http, prompt=TEXT, user="u", safety_identifier="s", prompt_cache_key="k")["choices"] == plain
    )


def test_null_is_the_default(http: httpx.Client) -> None:
    plain = complete(http, prompt=TEXT)["choices"]
    names = "max_tokens temperature top_p top_k min_p n stop seed logprobs logit_bias stream stream_options echo suffix"
    names += " best_of priority timeout_s cache_salt"
    assert complete(http, prompt=TEXT, **dict.fromkeys(names.split()))["choices"] == plain


def echoed(http: httpx.Client, prompt: Any, **options: Any) -> dict[str, Any]:
    (choice,) = complete(http, prompt=prompt, echo=True, **options)["choices"]
    return choice


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs_scores_the_prompt(http: httpx.Client, codec: TextCodec, max_tokens: int) -> None:
    ids = codec.encode(TEXT)
    choice = echoed(http, TEXT, logprobs=1, max_tokens=max_tokens)
    assert choice["text"] == TEXT + expected_text(codec, TEXT, max_tokens)
    logprobs = choice["logprobs"]
    count = len(ids) + max_tokens
    assert all(len(values) == count for values in logprobs.values())
    assert (
        logprobs["token_logprobs"] == [None, *(-float(i) for i in range(1, len(ids)))] + [-0.25] * max_tokens
    )
    assert logprobs["top_logprobs"][0] is None and all(logprobs["top_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert choice["finish_reason"] == "length"


def test_echo_of_token_ids_is_scored_as_its_text_is(http: httpx.Client, codec: TextCodec) -> None:
    by_text, by_ids = (echoed(http, p, logprobs=0, max_tokens=2) for p in (TEXT, list(codec.encode(TEXT))))
    assert by_ids == by_text


def test_a_prompt_of_one_token_has_no_score(http: httpx.Client) -> None:
    choice = echoed(http, [100], logprobs=2, max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == choice["logprobs"]["top_logprobs"] == [None]


def test_max_tokens_0_needs_echo(http: httpx.Client) -> None:
    answer = complete(http, prompt=TEXT, max_tokens=0, echo=True)
    assert (answer["choices"][0]["text"], answer["usage"]["completion_tokens"]) == (TEXT, 0)
    assert answer["choices"][0]["logprobs"] is None
    refused = http.post("/v1/completions", json={"prompt": TEXT, "max_tokens": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


def test_offsets_of_a_sentencepiece_prompt_are_those_of_the_text_as_given() -> None:
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.sentencepiece_style()))
    prompt = PromptTokens(codec.encode("the lo"), "the lo")
    request = Request("r", prompt.token_ids, SamplingParams(1), 0.0)
    choice = Choice(0, request, prompt, TextStream(codec.detokenizer()), True, True)
    choice.prompt_logprobs = tuple(Token(token, -1.0) for token in prompt.token_ids[1:])
    entries = prompt_entries(codec, choice)
    assert [codec.token_bytes(e.token.token_id) for e in entries] == [b" the", b" ", b"lo"]
    assert [(e.start, e.known) for e in entries] == [(0, False), (3, True), (4, True)]


@pytest.mark.parametrize(("n", "shown"), [(1, [0]), (2, [0, 1])])
def test_best_of_gives_the_likeliest(http: httpx.Client, codec: TextCodec, n: int, shown: list[int]) -> None:
    """The fake engine's tokens are the less likely the larger the seed."""
    answer = complete(http, prompt=[TEXT, "Hello"], n=n, best_of=4, seed=3, max_tokens=3)
    wanted = [expected_text(codec, prompt, 3, 3 + i) for prompt in (TEXT, "Hello") for i in shown]
    assert [(c["index"], c["text"]) for c in answer["choices"]] == list(enumerate(wanted))
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 4 * 3, "all that was computed"
    reverse = complete(http, prompt=TEXT, n=1, best_of=3, seed=-10, max_tokens=3, logprobs=0)["choices"][0]
    assert reverse["text"] == expected_text(codec, TEXT, 3, -10)
    assert reverse["logprobs"]["token_logprobs"] == [-0.25 + 10 / 1024] * 3


def test_a_cache_salt_reaches_the_engine_and_changes_no_text(http: httpx.Client) -> None:
    plain = complete(http, prompt=TEXT)["choices"]
    assert complete(http, prompt=TEXT, cache_salt="tenant \U0001f9c2")["choices"] == plain


def test_what_orders_and_isolates_changes_no_text(http: httpx.Client) -> None:
    plain = complete(http, prompt=TEXT)["choices"]
    assert complete(http, prompt=TEXT, priority=-3, timeout_s=60, cache_salt="mine")["choices"] == plain


@pytest.mark.anyio
async def test_priority_and_cache_salt_reach_the_engine(codec: TextCodec) -> None:
    async with local_app(codec) as local:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            for given, seen in (({}, (0, None)), ({"priority": -7, "cache_salt": "mine"}, (-7, "mine"))):
                answer = await local.http.post(path, json=body | given | {"max_tokens": 1})
                assert answer.status_code == 200
                assert (local.client.seen[-1].priority, local.client.seen[-1].cache_salt) == seen
