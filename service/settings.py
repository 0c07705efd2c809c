"""Every knob, with its meaning and default: the only reader of the environment and of command line flags.

A field `max_queue` is the flag --max-queue and the environment variable NYBBLE_MAX_QUEUE; a flag wins. Secrets are no
flags, since every user of a machine sees the command lines of all.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from nybble.service.engine.protocol import EngineConfig
from nybble.service.errors import ConfigError
from nybble.service.logs import LogConfig

ENV_PREFIX = "NYBBLE_"
# Settings that are EngineConfig's fields under the same name.
ENGINE_FIELDS = (
    *("dtype", "device", "max_model_len", "max_running", "block_size", "kv_cache_bytes", "memory_fraction"),
    *("prefill_tokens", "prefill_tokens_busy", "prefix_cache", "lm_head", "dense_copies", "threads"),
    *("gemm_sample_every", "kernel_cache", "kernel_cache_shared"),
)


MIN_KEY_CHARS = 8
# Fields that are no flags.
ENVIRONMENT_ONLY = ("api_keys",)


# Variables of deploy/, which stand in the same file, and those that Kubernetes makes up beside a service of that name.
_OTHERS = re.compile(ENV_PREFIX + "(ARCH|MODELS|PUBLISH|RENDER_GID|VIDEO_GID|SERVICE_.*|PORT_.*)")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _digest(key: str) -> bytes:
    if len(key) < MIN_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"an API key has {MIN_KEY_CHARS} or more printable ASCII characters and no spaces")
    return digest(key)


def _digests(value: Any) -> Any:
    """Of a comma-separated list. One without any key is refused: it was meant to keep somebody out."""
    if not isinstance(value, str):
        return value
    digests = tuple(_digest(key) for part in value.split(",") if (key := part.strip()))
    if not digests:
        raise ValueError("it is set but has no key in it; give keys separated by commas, or unset it")
    return digests


_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")


def _origins(value: str) -> str:
    for part in value.split(","):
        if part.strip() and not _ORIGIN.fullmatch(part.strip()):
            raise ValueError(
                f"hold scheme://host or scheme://host:port, without a path, or *, separated by commas; {part.strip()[:100]!r} "
                "is none"
            )
    return value


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, frozen=True, extra="forbid", protected_namespaces=()
    )

    # what is served
    model: str = Field(min_length=1, description="A model folder, a GGUF file, a hub id, or `demo`.")
    served_model_name: str = Field(
        "", description="Name of the model in the API; empty: the last part of MODEL."
    )
    # where
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    # HTTP limits
    max_queue: int = Field(
        256, ge=1, description="Requests in progress, waiting ones included; beyond, the answer is 429."
    )
    body_limit_bytes: int = Field(
        8 * 2**20, ge=1024, description="Largest request body; beyond, the answer is 413."
    )
    body_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Longest time that a request body may take to arrive; beyond, the answer is 408. 0: no limit.",
    )
    request_timeout_s: float = Field(
        0.0,
        ge=0,
        description="Longest time a request may take, queue included; beyond, the answer is 408. 0: no limit.",
    )
    step_timeout_s: float = Field(
        120.0,
        ge=0,
        description="An engine that has requests and says nothing for so long hangs, and is killed and restarted. 0: never.",
    )
    load_timeout_s: float = Field(
        900.0,
        ge=0,
        description="The same for an engine that loads and shows no progress, which compiling kernels for the first time does "
        "not either. 0: never.",
    )
    shutdown_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="How long running requests may go on after SIGTERM."
    )
    # who may ask
    api_keys: Annotated[tuple[bytes, ...], NoDecode, BeforeValidator(_digests)] = Field(
        (),
        repr=False,
        description="Keys that clients must send one of, separated by commas; kept as SHA-256 digests.",
    )
    api_key_file: str = Field(
        "",
        description="File with a key a line, which are added to those of NYBBLE_API_KEYS; # begins a comment.",
    )
    metrics_without_key: bool = Field(False, description="Answer /metrics without an API key.")
    cors_origins: Annotated[str, AfterValidator(_origins)] = Field(
        "",
        description="Origins of web pages that may ask, separated by commas, such as https://chat.example; * for any.",
    )
    tls_certfile: str = Field("", description="Certificate chain (PEM); with it the server speaks HTTPS.")
    tls_keyfile: str = Field(
        "", description="Private key of the certificate (PEM), if it is in a file of its own."
    )
    metrics_aliases: bool = Field(
        True,
        description="Repeat metrics under the vllm: names that dashboards and routers read; promtool's lint dislikes colons.",
    )
    # logs
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level logged.")
    log_format: Literal["human", "json"] = Field(
        "human", description="Lines for people, or a JSON object a line."
    )
    log_prompts: bool = Field(
        False, description="Log the text of prompts too, which may be private; else nothing of it is logged."
    )
    # engine
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Type of activations; auto picks what the device is good at."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto, cpu, cuda or cuda:N (ROCm is cuda too).",
    )
    max_model_len: int = Field(
        0, ge=0, description="Longest prompt and answer in tokens; 0: the model's own."
    )
    max_running: int = Field(16, ge=1, le=4096, description="Requests computed together.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in one KV cache block.")
    kv_cache_bytes: int = Field(0, ge=0, description="Bytes of KV cache; 0: what the memory plan gives.")
    memory_fraction: float = Field(
        0.9, gt=0, le=1, description="Part of the available memory that the plan may use."
    )
    # Rows of a launch's grid: CUDA and HIP have 65535 at most.
    prefill_tokens: int = Field(512, ge=1, le=32768, description="Most prompt tokens computed in one step.")
    prefill_tokens_busy: int = Field(
        0,
        ge=0,
        le=32768,
        description="The same while other requests are decoding; 0: as many as keep the time between their tokens under "
        "three times the usual, by measured step times.",
    )
    prefix_cache: bool = Field(
        True, description="Keep the KV cache of finished requests for prompts that begin alike."
    )
    lm_head: str = Field(
        "auto",
        min_length=1,
        description="keep: a 16-bit output head as it is; int8: read in int8, one scale a row; int4: read in int4, with the "
        "32 best logits from the 16-bit rows; auto: int4 on a CPU, else keep.",
    )
    dense_copies: Literal["disabled", "enabled", "auto"] = Field(
        "disabled",
        description="16-bit copies of the int4 layers for faster prefill: enabled refuses to start where they leave no "
        "room for one request of max_model_len, auto goes on without them.",
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of the engine; 0: as many as are fastest, measured at start.",
    )
    gemm_sample_every: int = Field(
        32, ge=0, description="Time the GEMM calls of one in this many steps; 0: of none."
    )
    kernel_cache: str = Field(
        "", description="Folder that keeps compiled kernels; empty: kernels/ in Nybble's cache folder."
    )
    kernel_cache_shared: str = Field(
        "/usr/share/nybble/kernels",
        description="Folder of kernels compiled by `nybble warm`, read before the other; it need not exist.",
    )

    def engine_config(self, folder: str) -> EngineConfig:
        """What the engine process is told. folder: where MODEL was found."""
        return EngineConfig(model=folder, **{name: getattr(self, name) for name in ENGINE_FIELDS})

    def log_config(self) -> LogConfig:
        return LogConfig(self.log_level.upper(), self.log_format)

    def key_digests(self) -> frozenset[bytes]:
        """SHA-256 of every API key; none: no key is needed.

        Raises ConfigError for a key file that cannot be read or has no key: it was meant to keep somebody out.
        """
        if not self.api_key_file:
            return frozenset(self.api_keys)
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or "it is not UTF-8"
            raise ConfigError(f"--api-key-file {self.api_key_file!r} cannot be read: {reason}") from None
        keys = [key for line in lines if (key := line.partition("#")[0].strip())]
        if not keys:
            raise ConfigError(f"--api-key-file {self.api_key_file!r} has no key in it; give one a line")
        try:
            return frozenset((*self.api_keys, *map(_digest, keys)))
        except ValueError as error:
            raise ConfigError(f"--api-key-file {self.api_key_file!r}: {error}") from None

    @property
    def origins(self) -> list[str]:
        return [origin for part in self.cors_origins.split(",") if (origin := part.strip())]

    def api_model_name(self) -> str:
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]


def load_settings(flags: dict[str, Any]) -> Settings:
    """Settings from flags (None: not given), else the environment, else defaults.

    Raises ConfigError with one line that names each bad flag or variable, its value and what is accepted.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(problem, given) for problem in error.errors())) from None


def ignored_variables(environ: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that looks like a setting and is none. A misspelt NYBBLE_API_KEYS leaves a server open."""
    known = [name.upper() for name in Settings.model_fields]
    for variable in sorted(environ):
        name = variable.removeprefix(ENV_PREFIX)
        if name not in (variable, *known) and not _OTHERS.fullmatch(variable):
            close = difflib.get_close_matches(name, known, 1)
            yield f"{variable} is no setting and is ignored" + (
                f"; is {ENV_PREFIX}{close[0]} meant?" if close else ""
            )


def _explain(problem: Any, given: dict[str, Any]) -> str:
    name = str(problem["loc"][0]) if problem["loc"] else "settings"
    source = flag_name(name) if name in given else ENV_PREFIX + name.upper()
    if problem["type"] == "missing":
        return f"{source} is not set: {Settings.model_fields[name].description}"
    accepted = _accepted(name, problem)
    if name in ENVIRONMENT_ONLY:
        return f"{source} is not accepted: {accepted.removeprefix('Value error, ')}"
    return f"{source}={str(problem['input'])[:100]!r} is not accepted: it should {accepted}"


def _accepted(name: str, problem: Any) -> str:
    if problem["type"] == "string_pattern_mismatch":
        return f"be {str(Settings.model_fields[name].description).rstrip('.')}"
    return (
        str(problem["msg"])
        .removeprefix("Input should ")
        .removeprefix("Value error, ")
        .split(", unable to parse")[0]
    )


def flag_name(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")
