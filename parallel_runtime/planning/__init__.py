"""From a wish to a plan: cost, limits, explanation, how blocks and patches are cut."""
