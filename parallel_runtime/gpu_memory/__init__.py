"""Memory that PyTorch does not give: addresses that stay, pages of the host that a GPU reads; calls of the driver."""
