"""The mesh, and one module for each axis."""
