"""`pytest -p tests.device.plugin`: the tests that need a GPU run on the simulated one."""

import os
import sys

from tests.device import simulation

simulation.install()
STATUS = [0]


def pytest_sessionfinish(exitstatus):
    STATUS[0] = int(exitstatus)


def pytest_unconfigure():
    # torch's own threads end badly where its libraries were loaded by hand
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS[0])
