"""Regular expressions out of a checkpoint's settings. `re` can take forever over one; `regex` can be told to stop."""

from __future__ import annotations

import regex

from nybble.service.errors import CheckpointError

LIMIT_S = 5.0  # per module name; an honest pattern takes microseconds


def compiled(pattern: str, where: str) -> regex.Pattern[str]:
    """Raises CheckpointError for what is no regular expression."""
    try:
        return regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"{where}: given the pattern {pattern!r:.200}, accepted a regular expression ({error}); correct it, or take "
            "another quantisation of this model"
        ) from error


def matches(pattern: regex.Pattern[str], module: str, where: str) -> bool:
    """Whether the pattern matches the beginning of a module's name. Raises CheckpointError when that takes too long."""
    try:
        return pattern.match(module, timeout=LIMIT_S) is not None
    except TimeoutError as error:
        raise CheckpointError(
            f"{where}: the pattern {pattern.pattern!r:.200} takes over {LIMIT_S:g} s on module {module}, accepted one without "
            "repetitions of repetitions; correct it, or take another quantisation of this model"
        ) from error
