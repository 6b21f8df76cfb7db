"""The diffusion transformer, and tasks that are not language modelling."""
