"""Exit code 0 if the service in this container answers /livez, else 1. Without any package, and without curl."""

from __future__ import annotations

import os
import ssl
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection

TIMEOUT_S = 4


def livez() -> int:
    """The HTTP status. Raises OSError or HTTPException where there is none."""
    port = int(os.environ.get("NYBBLE_PORT", "8000"))
    if os.environ.get("NYBBLE_TLS_CERTFILE"):
        # Its own certificate, which names another host than this one.
        context = ssl._create_unverified_context()
        connection: HTTPConnection = HTTPSConnection("127.0.0.1", port, timeout=TIMEOUT_S, context=context)
    else:
        connection = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request("GET", "/livez")
    return connection.getresponse().status


if __name__ == "__main__":
    try:
        status = livez()
    except (OSError, HTTPException) as error:
        sys.exit(f"/livez: {error}")
    sys.exit(0 if status == 200 else f"/livez: {status}")
