"""Ranks, axes, process groups, and how ranks agree."""
