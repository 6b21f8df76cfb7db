"""This room answers which mesh and options suit a model on a cluster, before any device is rented.

It exports the trace of one step on tensors without memory, and the estimates made from it.
"""
