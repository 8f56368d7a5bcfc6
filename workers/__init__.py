"""The pool: wire protocol, client, supervisor, rank loop. Knows requests and tensors, not diffusion."""
