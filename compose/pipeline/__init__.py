"""Stages of a model, their schedules, and what runs them."""
