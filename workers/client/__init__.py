"""What the nodes talk to."""
