"""A network over a mesh: what is common to all sources of networks."""
