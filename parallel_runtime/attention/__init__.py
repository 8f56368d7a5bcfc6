"""Attention: kernels and their choice, Ulysses, ring, processors rebound, rotation."""
