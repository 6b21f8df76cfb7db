"""The meaning of the tensors of a batch."""

IGNORE = -100
"""The target of a token from which nothing is learnt, as in ``torch.nn.functional.cross_entropy``."""
