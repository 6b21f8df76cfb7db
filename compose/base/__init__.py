"""This room answers what all other rooms need, and imports none of them.

It has checked fields, safe files, lazy names, and the differences between versions of PyTorch.
"""
