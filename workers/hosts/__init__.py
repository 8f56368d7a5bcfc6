"""Pools over several machines."""
