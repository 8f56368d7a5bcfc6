"""Blocks that come to a GPU when they run: shares of their bytes, slots, what ranks tell each other of them."""
