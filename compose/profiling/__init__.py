"""What uses a run's time and memory."""
