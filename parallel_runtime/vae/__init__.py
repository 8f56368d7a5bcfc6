"""ComfyUI's VAEs over ranks that share out the rows of a picture."""
