"""hoglib's logger. It reports compilation, which takes seconds or minutes.

logging.getLogger("hoglib").setLevel(logging.WARNING)       # silences it
"""

import logging
import sys


class _StderrHandler(logging.Handler):
    """Prints to the stderr of the moment, which tests and notebooks replace."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"hoglib: {record.getMessage()}", file=sys.stderr, flush=True)


LOGGER = logging.getLogger("hoglib")
if LOGGER.level == logging.NOTSET:  # unless the user has set one before the import
    LOGGER.setLevel(logging.INFO)
if not LOGGER.handlers:
    LOGGER.addHandler(_StderrHandler())
    LOGGER.propagate = False
