"""Exit code 0 if the service in this container answers a route with 200: `healthcheck.py [ROUTE]`, by default /livez.

For images: it needs no package and no curl. Port, TLS and API key are those that the service was given.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

TIMEOUT_S = 4


def api_key(environment: Mapping[str, str]) -> str:
    """One of the keys that the service accepts; empty where it asks for none. Raises OSError."""
    keys = environment.get("NYBBLE_API_KEYS", "").split(",")
    if path := environment.get("NYBBLE_API_KEY_FILE"):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        keys += [line.partition("#")[0] for line in lines]
    return next(filter(None, map(str.strip, keys)), "")


def ask(route: str, environment: Mapping[str, str]) -> int:
    """The HTTP status. Raises OSError or HTTPException where there is none."""
    port = int(environment.get("NYBBLE_PORT", "8000"))
    if environment.get("NYBBLE_TLS_CERTFILE"):
        # Its certificate names the host as others know it.
        context = ssl._create_unverified_context()
        connection: HTTPConnection = HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
    else:
        connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    key = api_key(environment)
    connection.request("GET", route, headers={"Authorization": f"Bearer {key}"} if key else {})
    return connection.getresponse().status


def main(route: str = "/livez") -> None:
    try:
        status = ask(route, os.environ)
    except (OSError, HTTPException) as error:
        sys.exit(f"{route}: {error}")
    if status != 200:
        sys.exit(f"{route}: {status}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
