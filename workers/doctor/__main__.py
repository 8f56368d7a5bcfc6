"""`python -m workers.doctor`."""

import sys

from .doctor import main

sys.exit(main())
