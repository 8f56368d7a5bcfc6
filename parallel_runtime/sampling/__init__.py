"""The denoising loop inside the ranks, with the sigmas and the noise that ComfyUI would use."""
