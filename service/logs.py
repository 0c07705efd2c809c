"""One log format, to stderr, in both processes."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: int | str) -> None:
    """level is for our own loggers; libraries are heard from warnings on."""
    logging.basicConfig(level=logging.WARNING, format=FORMAT, stream=sys.stderr, force=True)
    logging.getLogger("nybble").setLevel(level)
