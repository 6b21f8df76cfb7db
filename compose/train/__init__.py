"""The trainer, its step and its hooks."""
