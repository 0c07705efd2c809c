"""Triton's interpreter without a third of its time."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def patch_once_per_launch(interpreter: ModuleType) -> None:
    """A launch puts the interpreter's functions into triton.language and takes them out at its end. Each call of one jitted
    function by another puts them there again, where they are already: it looks through the whole language for that, and
    takes longer than most of what is called."""
    patch, language = interpreter._patch_lang, interpreter.tl

    def patch_unless_patched(function: Any) -> Any:
        sees_it = any(value is language for value in function.__globals__.values())
        if sees_it and not language.core.is_builtin(language.load):
            return None
        return patch(function)

    interpreter._patch_lang = patch_unless_patched
