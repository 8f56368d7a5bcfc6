"""Blocks whose weights are not on the device for good, and come just before they run."""
