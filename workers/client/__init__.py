"""What the nodes talk to: pools by their devices, the one life of each, whose turn it is, what ranks hold."""
