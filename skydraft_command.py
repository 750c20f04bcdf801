"""The command `skydraft`. It stands beside the package, whose import takes a moment in which Ctrl-C may come."""

from __future__ import annotations

import os
import sys

_INTERRUPTED = 130  # what shells use for a process ended by Ctrl-C


def main() -> None:
    """Run a command and exit, as `skydraft.cli.main.main` does."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is said by us, in one line
    try:
        from skydraft.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("skydraft: Interrupted.", file=sys.stderr)
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
