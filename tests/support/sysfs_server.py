"""`nybble serve` that reads the GPU driver's figures from a tree made up: python sysfs_server.py SYSFS serve MODEL ..."""

import functools
import sys

from nybble.service import app, cli

if __name__ == "__main__":
    app.read_gpu_memory = functools.partial(app.read_gpu_memory, sysfs=sys.argv.pop(1))
    cli.main()
