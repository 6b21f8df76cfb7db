"""Layers that models share: plain PyTorch, nothing distributed."""
