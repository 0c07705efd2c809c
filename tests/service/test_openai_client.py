"""The real openai client drives a real server process: what it parses is what users get.

The tests hold for any model: they compare answers with each other, not with known text. They run against the fake
engine and against the real one with a small checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from http_fixtures import run_server

MESSAGES = [{"role": "user", "content": "Say hello to the world."}]
PROMPT = "The quick brown fox jumps over the lazy dog. The quick brown"


CHECKPOINT = Path(__file__).parents[1] / "data" / "llama-ct-g32"


@pytest.fixture(scope="module", params=["fake engine", "llama-ct-g32"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "fake engine":
        yield request.getfixturevalue("server_url")
        return
    # Exact arithmetic: 16 bits would let batching decide between tokens that are nearly as likely.
    flags = ("--device", "cpu", "--dtype", "float32", "--lm-head", "keep", "--kv-cache-bytes", "8000000")
    log = tmp_path_factory.mktemp("real") / "log"
    with run_server(CHECKPOINT, log, *flags, real=True) as server:
        server.wait_listening()
        server.wait_ready()
        yield server.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    found = client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model")
    assert found.max_model_len > 0  # type: ignore[attr-defined]


def test_chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert isinstance(choice.message.content, str)
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 12
    assert answer.system_fingerprint


def test_a_chat_stream_is_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_streaming_helper_accumulates(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0
    ) as stream:
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            final = cut.completion
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_a_completion_and_its_stream(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**options)
    streamed = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert streamed[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None and whole.usage.completion_tokens <= 16


def test_two_choices(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "messages": MESSAGES, "max_tokens": 8, "n": 2, "seed": 7}
    whole = client.chat.completions.create(**options)
    assert [choice.index for choice in whole.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 16, "seed": 11}
    assert (
        client.completions.create(**options).choices[0].text
        == client.completions.create(**options).choices[0].text
    )


def test_several_prompts(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "max_tokens": 8, "temperature": 0}
    both = client.completions.create(prompt=[PROMPT, "Hello"], **options)
    alone = [
        client.completions.create(prompt=prompt, **options).choices[0].text for prompt in (PROMPT, "Hello")
    ]
    assert [choice.text for choice in both.choices] == alone


def test_stop(client: openai.OpenAI, model: str) -> None:
    options = {"model": model, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    assert stop
    for stream in (False, True):
        answer = client.completions.create(**options, stop=stop, stream=stream)
        choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
        assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
        assert choices[-1].finish_reason == "stop"


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    text = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert text.decode("utf-8", "replace") == answer.choices[0].message.content
    for token in logprobs.content:
        assert -9999 <= token.logprob <= 0 and len(token.top_logprobs) == 3
        assert all(-9999 <= top.logprob <= 0 for top in token.top_logprobs)


def test_completion_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens and logprobs.token_logprobs and logprobs.top_logprobs
    assert answer.usage is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs)


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unsupported:
        client.chat.completions.create(
            model=model, messages=MESSAGES, response_format={"type": "json_object"}
        )
    assert unsupported.value.param == "response_format"
    # And the server goes on.
    assert client.completions.create(model=model, prompt="Hi", max_tokens=1).choices[0].finish_reason


def test_extra_fields(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=4,
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "return_token_ids": True,
        },
    )
    assert len(answer.choices[0].token_ids) == 4  # type: ignore[attr-defined]
    assert len(answer.choices[0].prompt_token_ids) == answer.usage.prompt_tokens  # type: ignore
