"""`python -m workers.rank`."""

import gc

gc.disable()  # imports make objects that stay, which the collector would look through for a fifth of their time

from .start import main  # noqa: E402

gc.freeze()
gc.enable()
main()
