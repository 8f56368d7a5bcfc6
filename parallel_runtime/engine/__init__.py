"""A file for each kind of request (`prepared_*.py`); models by name, their weights, memory checks, meshes by plan."""
