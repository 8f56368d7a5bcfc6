"""What the engine is asked for, and facts of model, request and machine."""
