"""A loop over branches: predictions, checks of what is read, progress."""
