"""A FLUX of two million parameters that has learned to draw emoji by their names."""
