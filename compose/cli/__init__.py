"""The command line: train.py and python -m compose."""
