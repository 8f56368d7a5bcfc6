"""Numbers out of a real ComfyUI: `python -m benchmarks.in_comfyui` starts a server and measures in it."""
