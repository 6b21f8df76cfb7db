"""Checkpoints: sharded, written while training goes on, resumed on any mesh."""
