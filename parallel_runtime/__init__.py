"""The engine: a diffusion transformer spread over the ranks of a mesh. Imports neither ComfyUI nor `workers`."""
