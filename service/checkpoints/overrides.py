"""Settings of single modules: `dynamic` of GPTQModel and `extra_config` of auto-round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nybble.service.checkpoints.base import Scheme, flag, refused, settings, whole
from nybble.service.checkpoints.patterns import compiled, matches

SKIP, ADD = "-:", "+:"
SIXTEEN = 16


class Overrides:
    """module -> Scheme.

    `dynamic` maps patterns to changed fields; the first that is the module's name, or matches its beginning, counts.
    "-:" before a pattern leaves its modules unquantised, "+:" says nothing. `extra_config` does the same by exact name,
    or by pattern, in auto-round's newer files.
    """

    def __init__(self, scheme: Scheme, quantization: Mapping[str, Any], where: str) -> None:
        self._scheme = scheme
        self._where = where
        self._rows = [
            (f"{source}[{pattern!r}]", pattern, settings(rows, pattern, f"{where}: {source}"))
            for source in ("dynamic", "extra_config")
            for rows in (settings(quantization, source, where),)
            for pattern in rows
        ]
        self._compiled = [
            compiled(pattern.removeprefix(SKIP).removeprefix(ADD), f"{where}: {label}")
            for label, pattern, _ in self._rows
        ]
        for label, pattern, fields in self._rows:
            if not pattern.startswith(SKIP):
                self._changed(label, fields)

    def of(self, module: str, accepted_bits: Sequence[int]) -> Scheme:
        """Raises CheckpointError, naming the module, for bits that are not accepted."""
        for (label, pattern, fields), found in zip(self._rows, self._compiled, strict=True):
            if pattern == module or matches(found, module, f"{self._where}: {label}"):
                # A skipped module with quantised tensors: what the tensors are is what the common settings say.
                scheme = self._scheme if pattern.startswith(SKIP) else self._changed(label, fields)
                break
        else:
            scheme = self._scheme
        if scheme.bits not in accepted_bits:
            raise refused(
                f"{self._where}: module {module}", "bits", scheme.bits, " or ".join(map(str, accepted_bits))
            )
        return scheme

    def _changed(self, label: str, fields: Mapping[str, Any]) -> Scheme:
        where = f"{self._where}: {label}"
        given = fields.get("data_type")
        if given not in (None, "int") and whole(fields, "bits", where, 0) < SIXTEEN:
            raise refused(where, "data_type", given, "int")
        s = self._scheme
        return replace(
            s,
            bits=whole(fields, "bits", where, s.bits),
            group_size=whole(fields, "group_size", where, s.group_size),
            symmetric=flag(fields, "sym", where, s.symmetric),
            act_order=flag(fields, "desc_act", where, s.act_order),
        )
