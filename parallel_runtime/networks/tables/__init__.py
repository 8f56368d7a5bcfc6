"""Classes of diffusion networks as data: how ranks share out the tokens of their blocks."""
