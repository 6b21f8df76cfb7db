"""This room answers how a run is saved and resumed.

Checkpoints are sharded, written while training goes on, and loaded on any mesh. Import its modules.
"""
