"""A file for requests alike (`prepared_*.py`): what ranks keep, runs, VAEs; models by name, and their weights."""
