"""In two processes a penalty has the gradient of one process, to 1e-12, or is refused in time."""

import itertools
import traceback

from tests.penalties import lightning_cases, processes, single_cases
from tests.several_processes import found_by_each

ONE = ("one backward", "one backward, penalty first")
# The layouts of a step whose gradients are the mean, of each wrap and call; all others are refused.
RIGHT = {
    "plain": {
        "ddp": ("penalty alone", *ONE, "one forward", "penalty, then loss", "loss, then penalty", "three backwards"),
        "loss by ddp, penalty by ddp.module": ONE,
        "loss by ddp.module, penalty by ddp": (
            "penalty alone", *ONE, "one forward", "loss, then penalty", "three backwards",
        ),
    },
    "static_graph": {"ddp": ("loss, then penalty", "three backwards"), "loss by ddp, penalty by ddp.module": ONE},
}  # fmt: skip
RIGHT["find_unused_parameters"] = RIGHT["gradient_as_bucket_view"] = RIGHT["plain"]
MATRIX = [
    (wrap, call)
    for wrap, call in itertools.product(processes.WRAPS, processes.CALLS)
    if wrap != "gradient_as_bucket_view" or call == "ddp"
]


def all_cases():
    """What is expected, a function and its arguments, by name."""
    cases = {}
    for wrap, call in MATRIX:
        for how in processes.LAYOUTS:
            expected = "mean" if how in RIGHT[wrap].get(call, ()) else "refused"
            cases[f"{wrap}, {call}, {how}"] = expected, processes.train, how, call, wrap
    cases |= single_cases.CASES
    return cases | {f"Lightning: {name}": case for name, case in lightning_cases.CASES.items()}


def run_all(rank, folder, found):
    for name, (_, case, *args) in all_cases().items():
        try:
            found[name] = case(*args)
        except Exception:
            found[name] = traceback.format_exc()
            break  # the other process may wait for this one


def test_the_mean_gradient_or_an_error(tmp_path):
    """One test of all cases: to start two processes takes longer than what they do."""
    for found in found_by_each(run_all, tmp_path):
        expected = {name: case[0] for name, case in all_cases().items()}
        wrong = {name: found.get(name) for name in expected if found.get(name) != expected[name]}
        assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())
