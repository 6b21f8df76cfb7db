"""Which tokens sample n of a run holds."""
