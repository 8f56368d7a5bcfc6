"""The process between ComfyUI and the ranks: who may talk to it, jobs, stalls, the verdict on a failure."""
