"""This room answers what a command line asks for, and runs the commands of `python -m compose`.

It exports nothing: each command is a module.
"""
