"""Operators of one device: attention, norms, dropout and the loss."""
