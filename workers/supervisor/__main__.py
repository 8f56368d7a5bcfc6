"""`python -m workers.supervisor`."""

from .supervisor import main

main()
