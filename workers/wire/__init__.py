"""Messages, frames, tensors, connections."""
