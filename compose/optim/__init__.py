"""Optimizers, their state and the learning rate."""
