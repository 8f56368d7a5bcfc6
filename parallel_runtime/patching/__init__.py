"""LoRA and other patches of weights: as data that travels, kept by a rank, computed by ComfyUI's code."""
