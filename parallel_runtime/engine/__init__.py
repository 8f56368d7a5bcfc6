"""Prepares and runs requests: models by name, weights, memory, meshes."""
