"""What a file is, its header, reading it; weights on the device, on the host, in an arena."""
