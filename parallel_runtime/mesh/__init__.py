"""Ranks, axes and process groups; how ranks agree; unlike speeds."""
