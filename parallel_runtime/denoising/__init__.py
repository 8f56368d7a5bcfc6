"""A loop over branches: predictions, checks, progress."""
