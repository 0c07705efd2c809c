"""POST /tokenize, /detokenize and GET /tokenizer_info."""

from __future__ import annotations

import httpx
import pytest
import tiny_tokenizer
from http_fixtures import local_app
from transformers import PreTrainedTokenizerFast

from nybble.service.text import TextCodec

TEXT = "Hello world 你好 🙂"
USER = [{"role": "user", "content": "Hello"}]


def test_a_text_and_back(http: httpx.Client, codec: TextCodec) -> None:
    answer = http.post("/tokenize", json={"prompt": TEXT, "model": "tiny"}).json()
    ids = list(codec.encode(TEXT))
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids}
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": TEXT}


def test_special_tokens_are_read_and_written(http: httpx.Client) -> None:
    text = "<|im_start|>user"
    tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokens[0] == 1
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text


def test_nothing_is_a_text_too(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("open_end", [None, True, False])
def test_a_conversation(http: httpx.Client, codec: TextCodec, open_end: bool | None) -> None:
    body = {"messages": USER, "add_generation_prompt": open_end}
    answer = http.post("/tokenize", json=body).json()
    text = codec.render_chat(USER, add_generation_prompt=open_end is not False)
    assert answer["tokens"] == list(codec.encode(text, add_special_tokens=False))
    if open_end is not False:
        body = {"messages": USER, "max_tokens": 1, "return_token_ids": True}
        assert http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == answer["tokens"]


def test_token_strings(http: httpx.Client, codec: TextCodec) -> None:
    answer = http.post("/tokenize", json={"prompt": "Hello world", "return_token_strs": True}).json()
    assert "".join(answer["token_strs"]).replace("\u0120", " ") == "Hello world"


def test_a_long_text(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "Hello " * 20_000}).json()["count"] > 20_000
    assert len(http.post("/detokenize", json={"tokens": [100] * 20_000}).json()["prompt"]) >= 20_000


def test_the_tokenizer_describes_itself(http: httpx.Client) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
    assert info["chat_template"] == tiny_tokenizer.CHAT_TEMPLATE
    assert info["vocab_size"] > 300 and "/" not in info["tokenizer_class"]


@pytest.mark.anyio
async def test_bos_is_added_unless_told_not_to() -> None:
    tokenizer = tiny_tokenizer.byte_level()
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    async with local_app(codec, ready=False) as local:
        plain = (
            await local.http.post("/tokenize", json={"prompt": "Hello", "add_special_tokens": False})
        ).json()
        assert plain["max_model_len"] is None, "the tokenizer is there before the engine is"
        whole = (await local.http.post("/tokenize", json={"prompt": "Hello"})).json()
        assert whole["tokens"] == [0, *plain["tokens"]]
