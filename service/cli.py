"""The command line. Exit codes: 0, 1 for an error at run time, 2 for wrong usage.

Modules are imported by the command that needs them: the engine process imports this file too, when it starts.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nybble.service.errors import ConfigError, NybbleError
from nybble.service.settings import ENVIRONMENT_ONLY, Settings, flag_name, ignored_variables, load_settings

EXIT_RUNTIME, EXIT_USAGE = 1, 2

app = typer.Typer(
    name="nybble",
    help="Serves one 4-bit (W4A16) language model over HTTP.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def main() -> None:
    try:
        app()
    except NybbleError as error:
        print(f"nybble: {error.message}", file=sys.stderr)
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_RUNTIME)
    except KeyboardInterrupt:
        sys.exit(130)


def tidy_on_sigterm() -> None:
    """SIGTERM then ends the process as an error would, so that what is half-made is removed."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


class UsageError(ConfigError):
    """A flag or environment variable that is not accepted."""


def _show_version(value: bool) -> None:
    if value:
        from nybble.service.api.state import nybble_version

        print(f"nybble {nybble_version()}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _options_of_settings(command: Callable[[dict[str, Any]], None]) -> Callable[..., None]:
    """Gives a command one option per field of Settings, so that each is described in one place only.

    Values stay text here: Settings parses flags and environment variables alike.
    """

    def call(**flags: Any) -> None:
        command(flags)

    fields = Settings.model_fields.items()
    parameters = [_parameter(name, field) for name, field in fields if name not in ENVIRONMENT_ONLY]
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _parameter(name: str, field: Any) -> inspect.Parameter:
    help_text = field.description
    if name == "model":
        info = typer.Argument(help=help_text, metavar="MODEL", show_default=False)
    else:
        default = f" Default: {field.default}." if field.default != "" else ""
        info = typer.Option(flag_name(name), help=help_text + default, show_default=False)
    annotation = Annotated[str | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@app.command()
@_options_of_settings
def serve(flags: dict[str, Any]) -> None:
    """Serve MODEL over HTTP. Every option is also an environment variable: --port is NYBBLE_PORT."""
    try:
        settings = load_settings(flags)
        settings.key_digests()
    except ConfigError as error:
        raise UsageError(error.message) from None
    from nybble.service import logs, server

    logs.configure_logging(settings.log_config())
    for sentence in ignored_variables(os.environ):
        logging.getLogger(__name__).warning("%s", sentence)
    # The processes that this one starts have no use for them.
    os.environ.pop("NYBBLE_API_KEYS", None)
    # A port that is taken is reported at once, not after the model has been found and loaded.
    with server.listen(settings) as sockets:
        server.run(settings, find_model(settings.model), sockets)


def find_model(model: str) -> str:
    """The folder of MODEL. A model folder is taken as it is; anything else is found, or made, by a process of its own.

    Finding may convert weights, which needs torch; this process must stay without it.
    """
    path = Path(model)
    with contextlib.suppress(OSError):  # of a name or a folder that cannot be looked at; `resolve` says why
        if path.is_dir() and ((path / "config.json").is_file() or not any(path.glob("*.gguf"))):
            return model
    command = [sys.executable, "-P", "-m", "nybble.service", "resolve", model]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = found.stdout.split("\n")
    if found.returncode != 0 or len(lines) < 2:
        # It has said why.
        raise typer.Exit(EXIT_RUNTIME)
    return lines[-2]


@app.command(hidden=True)
def resolve(model: str) -> None:
    """Print the folder of MODEL, after fetching or converting it if need be."""
    from nybble.service.checkpoints import resolve as find
    from nybble.service.logs import LogConfig, configure_logging

    configure_logging(LogConfig())
    tidy_on_sigterm()
    print(find(model))


@app.command()
def quantize(
    src: Annotated[Path, typer.Argument(help="A GGUF file or a folder with 16-bit weights.")],
    dst: Annotated[Path, typer.Argument(help="The folder to write; it must be empty or not exist yet.")],
    group_size: Annotated[
        Literal["32", "64", "128"], typer.Option(help="Input channels that share one scale.")
    ] = "32",
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option(help="Weigh rounding errors by activations measured on a short built-in text.")
    ] = True,
    prepack: Annotated[
        bool,
        typer.Option(
            "--prepack", help="Also save the layers as this machine's CPU keeps them: faster to load."
        ),
    ] = False,
) -> None:
    """Turn 16-bit or GGUF weights into a W4A16 folder (compressed-tensors)."""
    from nybble.service.checkpoints.quantize import QuantizeOptions
    from nybble.service.checkpoints.quantize import quantize as run
    from nybble.service.logs import LogConfig, configure_logging

    configure_logging(LogConfig())
    tidy_on_sigterm()
    run(src, dst, QuantizeOptions(int(group_size), symmetric, calibrate, prepack))


@app.command()
def warm(
    arch: Annotated[list[str], typer.Option(help="The chip, as gfx1151; several with several --arch.")],
    dtype: Annotated[
        Literal["both", "float16", "bfloat16"], typer.Option(help="Type of activations.")
    ] = "both",
    group_size: Annotated[
        Literal["all", "32", "64", "128"], typer.Option(help="Input channels that share one scale.")
    ] = "all",
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without or with zero points; both if not given."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder to fill; the user's own cache if not given. Images: /usr/share/nybble/kernels."
        ),
    ] = None,
) -> None:
    """Compile the GPU kernels of a chip ahead, without that GPU (AMD: needs clang and lld; NVIDIA: needs nvrtc)."""
    from nybble.service.folders import kernel_cache_folder
    from nybble.service.warm import Wanted, warm_chip

    wanted = Wanted(
        dtypes=("float16", "bfloat16") if dtype == "both" else (dtype,),
        group_sizes=(32, 64, 128) if group_size == "all" else (int(group_size),),
        symmetric=(True, False) if symmetric is None else (symmetric,),
    )
    tidy_on_sigterm()
    try:
        for chip in dict.fromkeys(arch):
            warm_chip(chip, wanted, output or kernel_cache_folder())
    except ConfigError as error:
        raise UsageError(error.message) from None


@app.command()
def doctor(
    model: Annotated[
        str,
        typer.Option(help="Also plan memory for this model, as `serve` would; nothing is loaded or fetched."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="The findings as JSON.")] = False,
    env: Annotated[
        bool,
        typer.Option(
            "--env", help="Only the .env lines that deploy/compose.yaml reads: profile, chip, groups."
        ),
    ] = False,
) -> None:
    """Examine this machine: chip, driver, kernel, firmware, device permissions, memory, versions; and say what to change.

    Exit code 0: nothing to change; 1: warnings; 2: errors, it will not run as it is.
    """
    from nybble.service.doctor import Facts, examine
    from nybble.service.doctor.report import as_env, as_json, as_text

    if env and (json or model):
        raise UsageError("--env writes lines of its own: leave out --json and --model")
    facts = Facts(model=model)
    if env:
        lines, hint = as_env(facts)
        print(lines)
        if hint:
            print(f"nybble: {hint}", file=sys.stderr)
            raise typer.Exit(EXIT_RUNTIME)
        return
    found = examine(facts)
    print(as_json(found) if json else as_text(found))
    raise typer.Exit(found.exit_code)


@bench.command()
def gemm(
    layers: Annotated[
        str, typer.Option(help="Layers of an 8B model, comma-separated: gate_up, down, qkv, o.")
    ] = "o",
    rows: Annotated[str, typer.Option(help="Numbers of rows M, comma-separated.")] = "1,2,4,8,16,64",
    dtype: Annotated[Literal["bfloat16", "float16"], typer.Option(help="Type of activations.")] = "bfloat16",
    group_size: Annotated[
        Literal["32", "64", "128"], typer.Option(help="Input channels that share one scale.")
    ] = "128",
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="Without or with zero points.")
    ] = True,
    paths: Annotated[
        str, typer.Option(help="Only paths whose names contain one of these, comma-separated.")
    ] = "",
    output: Annotated[Path | None, typer.Option(help="Write the table as JSON, too.")] = None,
) -> None:
    """Time every path of the int4 linear layer, and others' kernels that are installed, on the GPU or else the CPU.

    Exit code 1 when one fails or computes wrong numbers.
    """
    import torch

    from nybble.service.bench import GemmBench, bench_gemm, layers_of

    try:
        wanted = GemmBench(
            layers=layers_of(layers),
            ms=_numbers("--rows", rows),
            dtype=getattr(torch, dtype),
            group_size=int(group_size),
            symmetric=symmetric,
            paths=tuple(filter(None, paths.split(","))),
        )
    except ConfigError as error:
        raise UsageError(error.message) from None
    if not bench_gemm(wanted, output):
        raise typer.Exit(EXIT_RUNTIME)


def _options_of_bench(command: Callable[[Any, Path | None], None]) -> Callable[..., None]:
    """Gives a command the options that `bench decode`, `prefill` and `serve` share."""

    def call(
        shape: Annotated[
            str, typer.Option(help="Random weights in this shape; qwen3-8b, smollm2-135m and others.")
        ] = "qwen3-8b",
        model: Annotated[str, typer.Option(help="A model folder instead of a shape.")] = "",
        batches: Annotated[
            str, typer.Option(help="Sequences together, comma-separated. Of serve: streams.")
        ] = "1,8,64",
        contexts: Annotated[
            str,
            typer.Option(help="Tokens before a step; of prefill and serve: of the prompt. Comma-separated."),
        ] = "1024",
        tokens: Annotated[int, typer.Option(min=2, help="Tokens that are timed.")] = 64,
        group_size: Annotated[
            Literal["32", "64", "128"],
            typer.Option(help="Of random weights; smaller where a layer needs it."),
        ] = "128",
        device: Annotated[str, typer.Option(help="As of `nybble serve`.")] = "auto",
        dtype: Annotated[str, typer.Option(help="As of `nybble serve`.")] = "auto",
        lm_head: Annotated[str, typer.Option(help="As of `nybble serve`.")] = "auto",
        dense_copies: Annotated[str, typer.Option(help="As of `nybble serve`.")] = "disabled",
        prefill_tokens: Annotated[int, typer.Option(min=1, max=32768, help="As of `nybble serve`.")] = 512,
        threads: Annotated[int, typer.Option(min=0, help="As of `nybble serve`.")] = 0,
        output: Annotated[Path | None, typer.Option(help="Write the figures as JSON, too.")] = None,
    ) -> None:
        from nybble.service.bench_engine import EngineBench

        wanted = EngineBench(
            shape=shape,
            model=find_model(model) if model else "",
            batches=_numbers("--batches", batches),
            contexts=_numbers("--contexts", contexts),
            tokens=tokens,
            group_size=int(group_size),
            device=device,
            dtype=dtype,
            lm_head=lm_head,
            dense_copies=dense_copies,
            prefill_tokens=prefill_tokens,
            threads=threads,
        )
        tidy_on_sigterm()
        command(wanted, output)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    values = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(values) < 1:
        raise UsageError(f"{flag}={text!r} is not accepted: it should be numbers from 1 on, comma-separated")
    return values


@bench.command()
@_options_of_bench
def decode(wanted: Any, output: Path | None) -> None:
    """Time decode steps of the engine by batch and context, beside the limit of the bytes that they read."""
    from nybble.service.bench_engine import bench_decode

    bench_decode(wanted, output)


@bench.command()
@_options_of_bench
def prefill(wanted: Any, output: Path | None) -> None:
    """Time prompts from arrival to first token, beside the library's 16-bit GEMMs of the same layers."""
    from nybble.service.bench_engine import bench_prefill

    bench_prefill(wanted, output)


@bench.command(name="serve")
@_options_of_bench
def bench_serve(wanted: Any, output: Path | None) -> None:
    """Time streams over HTTP by concurrency, beside the engine without HTTP."""
    from nybble.service.bench_serve import bench_serve as run

    run(wanted, output)
