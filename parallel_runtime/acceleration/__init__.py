"""Forwards made faster: compiled blocks, passes, recordings. It and exchange/ alone use private parts of torch."""
