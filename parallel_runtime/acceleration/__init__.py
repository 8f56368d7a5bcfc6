"""All that touches private parts of torch: compiled blocks, rewritten graphs, recordings, memory of peers."""
