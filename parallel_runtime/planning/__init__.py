"""What a plan is chosen from: facts of model, request and machine, and what a step costs by them."""
