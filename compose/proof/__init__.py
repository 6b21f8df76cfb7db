"""The proof that a composition equals one process."""
