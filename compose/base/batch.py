"""What the tensors of a batch mean."""

IGNORE = -100
"""The target of a token that nothing is learnt from, as in ``torch.nn.functional.cross_entropy``."""
