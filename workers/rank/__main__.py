"""`python -m workers.rank`."""

from .start import main

main()
