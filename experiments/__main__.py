"""``python -m experiments {fit,validate,test,verify,spectrum} --config configs/...``"""

import sys

from experiments.command.cli import main

if __name__ == "__main__":
    sys.exit(main())
