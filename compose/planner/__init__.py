"""Which mesh and options suit a model on a cluster: memory and time without a device."""
