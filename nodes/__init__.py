"""The ComfyUI side: node classes, the MODEL with its transformer elsewhere. The only folder that imports ComfyUI."""
