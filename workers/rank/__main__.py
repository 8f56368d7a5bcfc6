"""`python -m workers.rank`."""

from .rank import main

main()
