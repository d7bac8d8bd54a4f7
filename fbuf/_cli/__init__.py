"""Subcommands of `python -m fbuf`."""
