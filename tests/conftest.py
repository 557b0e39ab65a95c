"""Settings of every test: one torch thread, matrix products that do not depend on the layout, and GPU
tests skipped where there is no GPU."""

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hoglib._core.torch_api.torch_version import TORCH_VERSION
from tests.rows import as_in_a_new_process

torch.set_num_threads(1)
# On Intel processors MKL rounds a product otherwise for a transposed or unaligned matrix, and a graph
# that is run one operation at a time has other layouts than autograd. MKL reads this at its first call.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")


# Warnings of torch 2.11, of its own: Dynamo's, of builtins that it runs uncompiled; and one about
# sparse tensors, which check_invariants= silences only in later releases.
OF_OLD_TORCH = (
    "ignore:Dynamo does not know how to trace the builtin:UserWarning",
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    for line in OF_OLD_TORCH if TORCH_VERSION < (2, 13) else ():
        config.addinivalue_line("filterwarnings", line)


def _files_of_the_checkout() -> set[str]:
    return {path.name for path in Path(__file__).parents[1].iterdir() if path.is_file()}


FILES = _files_of_the_checkout()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason to skip, with the number of tests; a skip without a reason is an error, and
    so is a file that a test left where it was started."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    assert "unconditional skip" not in reasons
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"SKIPPED {count}: {reason}")
    left = _files_of_the_checkout() - FILES
    assert not left, f"left in the checkout: {', '.join(sorted(left))}; write to tmp_path"


def pytest_collection_finish() -> None:
    """No collection of garbage looks through the modules and the tests again, and few look at all."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    as_in_a_new_process()


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What hoglib logs."""
    logger = logging.getLogger("hoglib")
    logger.addHandler(caplog.handler)
    with caplog.at_level("DEBUG", logger="hoglib"):
        yield caplog
    logger.removeHandler(caplog.handler)
