"""`python -m hoglib`."""

import sys

from hoglib.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
