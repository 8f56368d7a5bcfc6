"""Messages, frames, tensors, connections, and the memory that tensors go through instead."""
