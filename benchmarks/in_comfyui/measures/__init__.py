"""The measurements, by what they ask."""
