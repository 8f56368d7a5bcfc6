"""What of this machine works for a pool, what does not, and what to do about it."""
