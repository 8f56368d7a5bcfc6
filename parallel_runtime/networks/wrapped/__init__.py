"""diffusers' transformers as ranks run them together: cut blocks, or a stage's hooks."""
