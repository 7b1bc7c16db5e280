"""The command `wscope`, also as `python -m wscope_jax`.

The command line is imported once signals end the process quietly: until then Python would print its own traceback.
"""

import sys

from wscope_jax import interruption


def main() -> int:
    """Runs the command line of this process and returns its exit code, see `cli.main`."""
    interruption.end_at_once()
    from wscope_jax import cli

    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
