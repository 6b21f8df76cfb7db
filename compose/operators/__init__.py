"""Operators that models call, registered with PyTorch. They know of no mesh and no config."""
