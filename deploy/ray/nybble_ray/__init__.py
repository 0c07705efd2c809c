"""Nybble's service as replicas under Ray Serve; docs/scale-out.md says how to run it."""
