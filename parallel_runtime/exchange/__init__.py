"""How heads travel between GPUs for attention: over the peers' memory, the host's, or by NCCL, and which way when."""
