"""Ranks, axes and process groups; how ranks agree; links between stages; unlike speeds."""
