"""ComfyUI's own networks over a mesh: the class that ComfyUI would run, cut over the ranks by a few lines of data.

Only a rank imports `comfy`, and only when it loads such a network (comfy_code.py).
"""
