"""Families of diffusers' transformers: a file as data, and an adapter from ComfyUI's call."""
