"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that have none of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from nybble.service.api.answers import respond_json
from nybble.service.api.chat import check_names, check_template_variables, template_message
from nybble.service.api.schemas import DetokenizeRequest, TokenizeRequest
from nybble.service.api.state import Service, service_of
from nybble.service.errors import InvalidRequest
from nybble.service.text import SHORT_TEXT_CHARS, TextCodec


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    """The tokens of a text, or of a conversation as the model's template writes it."""
    service = service_of(request)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    for name in ("add_generation_prompt", "chat_template_kwargs"):
        if body.messages is None and getattr(body, name) is not None:
            raise InvalidRequest(f"{name} goes with messages", param=name)
    check_template_variables(body.chat_template_kwargs or {})
    check_names(service.codec, body.messages or ())
    # A long text takes a while.
    tokens = await asyncio.to_thread(_encode, service.codec, body)
    info = service.client.info
    answer: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": None if info is None else info.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = service.codec.pieces(tokens)
    return respond_json(answer)


def _encode(codec: TextCodec, body: TokenizeRequest) -> tuple[int, ...]:
    if body.prompt is not None:
        return codec.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    text = codec.render_chat(
        [template_message(message) for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt is not False,
        **body.chat_template_kwargs or {},
    )
    return codec.encode(text, add_special_tokens=bool(body.add_special_tokens))


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """The text of tokens, special ones included."""
    service = service_of(request)
    service.check_model(body.model)
    _check_tokens(service, body.tokens)
    if len(body.tokens) <= SHORT_TEXT_CHARS:
        text = service.codec.decode(body.tokens, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(service.codec.decode, body.tokens, skip_special_tokens=False)
    return respond_json({"prompt": text})


def _check_tokens(service: Service, tokens: Sequence[int]) -> None:
    info = service.client.info
    # The model's vocabulary may be padded beyond the tokenizer's: those tokens exist, without a text.
    size = max(service.codec.vocab_size, 0 if info is None else info.vocab_size)
    unknown = next((token for token in tokens if token >= size), None)
    if unknown is not None:
        raise InvalidRequest(
            f"{unknown} is not a token id of this model; they go from 0 to {size - 1}", param="tokens"
        )


async def tokenizer_info(request: Request) -> Response:
    """What tokenizer_config.json says of special tokens, and the chat template."""
    return respond_json(service_of(request).codec.describe())
