"""What the panel and the API see of pools and runs, and what they can do with them."""
