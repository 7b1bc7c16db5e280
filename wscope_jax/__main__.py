"""`python -m wscope_jax`: the same as the command `wscope`."""

import sys

from wscope_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
