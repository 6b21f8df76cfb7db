"""The command lines: how they are read, and what is behind `python -m compose`. Exports nothing: each
command is a module."""
