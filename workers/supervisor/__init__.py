"""The process between ComfyUI and the ranks."""
