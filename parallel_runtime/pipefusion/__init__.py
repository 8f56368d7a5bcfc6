"""PipeFusion (Fang et al. 2024): stages of blocks work on patches of the latent, with keys and values a step old."""
