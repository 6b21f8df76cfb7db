"""What a process imports before tests fork others from it: see tests/forks.py."""

import tests.helpers  # noqa: F401
