"""Families of diffusers' transformers: a file as data, and what makes their arguments of ComfyUI's call."""
