"""Messages in fewer bytes: quantized, low-rank and sparse weights and gradients."""
