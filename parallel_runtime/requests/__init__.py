"""What the engine is asked for."""
