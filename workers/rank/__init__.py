"""The process of one GPU."""
