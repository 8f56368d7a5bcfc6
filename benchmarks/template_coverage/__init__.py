"""Which of ComfyUI's official templates run on Parallel Loader, and why the others do not. `python -m` runs it."""
