"""`python -m zero_fn`: see `zero_fn/checkpoint/command.py`."""

import sys

from zero_fn.checkpoint.command import main

if __name__ == "__main__":
    sys.exit(main())
