"""Request bodies of /v1/completions and /v1/chat/completions, as OpenAI defines them, plus a few fields of other
servers (top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, priority, timeout_s, cache_salt,
return_token_ids, chat_template_kwargs), and of /tokenize and /detokenize.

Values are strict: a string is not a number. null means the default. A field that OpenAI has and we do not support
is accepted only with the value that changes nothing (see Unsupported); a field that nobody knows is an error.
`user`, `safety_identifier` and `prompt_cache_key` identify a caller; they are accepted and have no effect.

Tool calls and structured output stand together in ToolFields and FormatFields: whoever adds them begins there.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_MESSAGES = 4096
MAX_TIMEOUT_S = 86400.0

# Refusals that carry the error object's code.
INVALID, UNSUPPORTED = "invalid_value", "unsupported_parameter"

Prompt = str | tuple[int, ...]


def _invalid(message: str) -> PydanticCustomError:
    return PydanticCustomError(INVALID, "{message}", {"message": message})


class Unsupported:
    """Marks a field that is accepted only with one of the values that change nothing; null always is one."""

    def __init__(self, *neutral: Any) -> None:
        self.accepted = (None, *neutral)

    def check(self, value: Any) -> None:
        if any(value == accepted and type(value) is type(accepted) for accepted in self.accepted):
            return
        shown = ", ".join(json.dumps(accepted) for accepted in self.accepted)
        message = f"not supported by this server; leave it out or send {shown}"
        raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": list(self.accepted), "description": "Not supported: only values that change nothing."}


# --- prompts ---


def _is_token_list(value: Any) -> bool:
    # bool is a subclass of int, and true is not a token.
    return isinstance(value, list) and all(type(item) is int for item in value)


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _invalid("contains a lone surrogate, which is not a character") from None
    return text


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """All four forms as a tuple of prompts. Written by hand: pydantic's union would report every element of a long
    list once per form that it is not."""
    if isinstance(value, str):
        prompts: list[Any] = [value]
    elif _is_token_list(value) and value:
        prompts = [value]
    elif isinstance(value, list):
        prompts = value
    else:
        prompts = [None]
    if not prompts:
        raise _invalid(
            "is empty; give a string, a list of strings, token ids or a list of lists of token ids"
        )
    if len(prompts) > MAX_PROMPTS:
        raise _invalid(f"has {len(prompts)} prompts; at most {MAX_PROMPTS} are accepted in one request")
    if all(isinstance(prompt, str) for prompt in prompts):
        parsed: tuple[Prompt, ...] = tuple(_text(prompt) for prompt in prompts)
    elif all(_is_token_list(prompt) for prompt in prompts):
        parsed = tuple(tuple(prompt) for prompt in prompts)
    else:
        raise _invalid(
            "must be a string, a list of strings, a list of token ids or a list of lists of token ids"
        )
    if not all(parsed):
        raise _invalid("must not be empty")
    return parsed


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STRING_SCHEMA = {"type": "string", "minLength": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        _STRING_SCHEMA,
        {"type": "array", "items": _STRING_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKENS_SCHEMA,
        {"type": "array", "items": _TOKENS_SCHEMA, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "A string, a list of strings, token ids, or a list of lists of token ids.",
}
Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_parse_prompts), WithJsonSchema(_PROMPT_SCHEMA)]


# --- stop strings and logit bias ---


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid("must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _invalid(f"has {len(stops)} stop strings; at most {MAX_STOP_STRINGS} are accepted")
    if any(not 0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise _invalid(f"must hold strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(_text(stop) for stop in stops)


_ONE_STOP_SCHEMA = _STRING_SCHEMA | {"maxLength": MAX_STOP_CHARS}
_STOP_SCHEMA = {
    "anyOf": [
        _ONE_STOP_SCHEMA,
        {"type": "array", "items": _ONE_STOP_SCHEMA, "maxItems": MAX_STOP_STRINGS},
        {"type": "null"},
    ],
    "description": "The answer ends before any of these strings.",
}
Stop = Annotated[tuple[str, ...], PlainValidator(_parse_stop), WithJsonSchema(_STOP_SCHEMA)]


_TOKEN_KEY = re.compile("(0|[1-9][0-9]{0,8})")


def _parse_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise _invalid("must be an object from token ids to numbers from -100 to 100")
    if len(value) > MAX_LOGIT_BIAS:
        raise _invalid(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are accepted")
    return tuple(_parse_bias(key, bias) for key, bias in value.items())


def _parse_bias(key: str, bias: Any) -> tuple[int, float]:
    # One way to write each: of "5" and "05" nobody could tell which is meant.
    if not _TOKEN_KEY.fullmatch(key):
        raise _invalid(f"has the key {key[:50]!r}; keys are token ids")
    if type(bias) not in (int, float) or not -100 <= bias <= 100:
        raise _invalid(f"for token {key} must be a number from -100 to 100")
    return int(key), float(bias)


_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "propertyNames": {"pattern": f"^{_TOKEN_KEY.pattern}$"},
            "maxProperties": MAX_LOGIT_BIAS,
        },
        {"type": "null"},
    ],
    "description": "Added to the logits of these token ids.",
}
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_parse_logit_bias), WithJsonSchema(_BIAS_SCHEMA)
]


# --- messages ---

Role = Literal["system", "developer", "user", "assistant"]


def _parse_content(value: Any) -> str:
    """A string, or text parts, joined by newlines as the usual templates expect one string."""
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, list) or not value:
        raise _invalid("must be a string or a list of text parts")
    return "\n".join(_parse_part(part) for part in value)


def _parse_part(part: Any) -> str:
    if not isinstance(part, dict):
        raise _invalid('must be a string or a list of parts such as {"type": "text", "text": "..."}')
    if part.get("type") != "text":
        kind = str(part.get("type"))[:50]
        raise PydanticCustomError(
            UNSUPPORTED,
            "{message}",
            {"message": f"has a part of type {kind!r}; only text parts are supported"},
        )
    extra = next((key for key in part if key not in ("type", "text")), None)
    if extra is not None:
        message = f"has a text part with {extra[:50]!r}, which is not supported; send type and text alone"
        raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})
    if not isinstance(part.get("text"), str):
        raise _invalid('has a text part that is not of the form {"type": "text", "text": "..."}')
    return _text(part["text"])


_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        },
    ]
}
Content = Annotated[str, PlainValidator(_parse_content), WithJsonSchema(_CONTENT_SCHEMA)]


def _known_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise PydanticCustomError(
            UNSUPPORTED,
            "{message}",
            {"message": f"{value!r} is not supported: this server has no tool calls"},
        )
    if value not in get_args(Role):
        raise _invalid(f"must be one of {', '.join(get_args(Role))}")
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class ChatMessage(_Strict):
    role: Annotated[Role, BeforeValidator(_known_role)]
    content: Content
    name: str | None = Field(None, max_length=256)
    # What an answer of ours holds beside its text, for a client that sends it back as it came.
    refusal: Annotated[Any, Unsupported()] = None
    annotations: Annotated[Any, Unsupported([])] = None
    audio: Annotated[Any, Unsupported()] = None
    function_call: Annotated[Any, Unsupported()] = None
    tool_calls: Annotated[Any, Unsupported([])] = None


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="Send a last chunk with the usage and no choices.")
    include_obfuscation: Annotated[Any, Unsupported(False)] = None


# --- the two requests ---

Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class SamplingFields(_Strict):
    """What both requests share. None: the default."""

    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    temperature: float | None = Field(
        None,
        ge=0,
        le=2,
        allow_inf_nan=False,
        description="0, and what is less than 1e-5, is greedy. Default 1.",
    )
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="Default 1 (off).")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="0 or -1 is off, the default.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False, description="Default 0 (off).")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Answers per prompt. Default 1.")
    stop: Stop = ()
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description="The answer ends before any of these tokens."
    )
    seed: Seed | None = Field(None, description="Makes sampling repeatable; choice i uses seed + i.")
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=1e-3, le=1e3, allow_inf_nan=False)
    logit_bias: LogitBias = ()
    ignore_eos: bool | None = Field(None, description="Go on after the model's end-of-sequence tokens.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Of requests that wait, the least goes first. Default 0."
    )
    timeout_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TIMEOUT_S,
        allow_inf_nan=False,
        description="Give up after this many seconds, queue included. Default: the server's limit.",
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Cached prompt prefixes are shared with requests of the same salt alone.",
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(
        None, description="Add token_ids to every choice, and prompt_token_ids."
    )
    user: str | None = Field(None, description="Accepted, no effect.")
    safety_identifier: str | None = Field(None, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(None, description="Accepted, no effect.")


MaxTokens = Annotated[int, Field(ge=1, le=2**31 - 1)]


class OtherServersFields(_Strict):
    """Of vLLM and SGLang, whose routers and clients send them: with the values that are true here anyway."""

    allowed_token_ids: Annotated[Any, Unsupported()] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    detokenize: Annotated[Any, Unsupported(True)] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Unsupported(1.0, 1)] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    min_tokens: Annotated[Any, Unsupported(0)] = None
    no_stop_trim: Annotated[Any, Unsupported(False)] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    return_hidden_states: Annotated[Any, Unsupported(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False)] = None
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(True)] = None
    structured_outputs: Annotated[Any, Unsupported()] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None


class CompletionRequest(SamplingFields, OtherServersFields):
    prompt: Prompts
    max_tokens: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="At most this many tokens, and no more than the context leaves. Default 16. 0 needs echo: true.",
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Report log probabilities, of this many alternatives too."
    )
    echo: bool | None = Field(
        None,
        description="Put the prompt before the answer; with logprobs, its tokens' log probabilities too.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Make this many answers per prompt and give the n with the best log probability per token. "
        "Default n. More than n cannot be streamed.",
    )
    suffix: Annotated[Any, Unsupported("")] = None


class ToolFields(_Strict):
    """Tool calls, which are not supported yet."""

    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    parallel_tool_calls: Annotated[Any, Unsupported(True, False)] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    tools: Annotated[Any, Unsupported([])] = None


class FormatFields(_Strict):
    """Structured output, which is not supported yet."""

    response_format: Annotated[Any, Unsupported({"type": "text"})] = None


class ChatCompletionRequest(SamplingFields, ToolFields, FormatFields, OtherServersFields):
    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: MaxTokens | None = Field(None, description="Older name of max_completion_tokens.")
    max_completion_tokens: MaxTokens | None = Field(
        None, description="At most this many tokens, and no more than the context leaves. Default: all of it."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Needs logprobs: true.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="More variables for the model's chat template."
    )
    add_generation_prompt: Annotated[Any, Unsupported(True)] = None
    add_special_tokens: Annotated[Any, Unsupported(False)] = None
    audio: Annotated[Any, Unsupported()] = None
    continue_final_message: Annotated[Any, Unsupported(False)] = None
    echo: Annotated[Any, Unsupported(False)] = None
    include_reasoning: Annotated[Any, Unsupported(True, False)] = None
    metadata: Annotated[Any, Unsupported({})] = None
    moderation: Annotated[Any, Unsupported()] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    prediction: Annotated[Any, Unsupported()] = None
    prompt_cache_options: Annotated[Any, Unsupported({})] = None
    prompt_cache_retention: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    separate_reasoning: Annotated[Any, Unsupported(True, False)] = None
    service_tier: Annotated[Any, Unsupported("auto", "default")] = None
    store: Annotated[Any, Unsupported(False)] = None
    stream_reasoning: Annotated[Any, Unsupported(True, False)] = None
    verbosity: Annotated[Any, Unsupported()] = None
    web_search_options: Annotated[Any, Unsupported()] = None


# --- text and tokens ---


class TokenizeRequest(_Strict):
    """One of prompt and messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [
                {
                    "required": ["prompt"],
                    "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}},
                },
                {
                    "required": ["messages"],
                    "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}},
                },
            ]
        }
    )

    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    prompt: Annotated[str, AfterValidator(_text)] | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds its own (BOS). Default true with prompt, false with messages, whose "
        "template writes them.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the template ends with the head of an answer. Default true; with messages only.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, max_length=64, description="More variables for the template; with messages only."
    )
    return_token_strs: bool | None = Field(
        None, description="Add token_strs, each token as the vocabulary has it."
    )


class DetokenizeRequest(_Strict):
    model: str | None = Field(None, description="A name from /v1/models; may be left out.")
    tokens: list[TokenId]
