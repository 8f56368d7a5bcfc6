"""The engines that benchmarks/compare.py measures, a module each, and what they share."""
