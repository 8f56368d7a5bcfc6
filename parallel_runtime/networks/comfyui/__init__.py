"""ComfyUI's own networks over a mesh; only a rank imports `comfy`, when it loads one (comfy_code.py)."""
