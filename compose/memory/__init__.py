"""Recomputation, offload, types, compile and LoRA: what a step keeps, and in which form."""
