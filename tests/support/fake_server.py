"""`nybble serve` with the fake engine: python fake_server.py serve MODEL [flags as nybble serve has them]."""

import functools

from nybble.service import cli, server

if __name__ == "__main__":
    server.run = functools.partial(server.run, engine_main="fake_engine:main")
    cli.main()
