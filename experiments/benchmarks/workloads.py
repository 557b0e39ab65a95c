"""Every workload by name. To add one: an entry where its kind is, with methods of a problem."""

from experiments.benchmarks import curvature_workloads, penalty_workloads
from experiments.benchmarks.meta import workloads as meta_workloads
from experiments.benchmarks.workload import Workload

WORKLOADS: dict[str, Workload] = {
    **curvature_workloads.WORKLOADS,
    **penalty_workloads.WORKLOADS,
    **meta_workloads.WORKLOADS,
}
PROBLEMS = list(dict.fromkeys(name for w in WORKLOADS.values() for name in w.problems))
# The distributions of the methods that are neither torch nor hoglib.
PEERS = ["curvlinops-for-pytorch", "hessian-eigenthings", "PyHessian", "higher", "torchopt", "jax"]


def chosen(
    workloads: list[str] | None, problems: list[str] | None, full: bool
) -> list[tuple[str, str]]:
    """(workload, problem) to measure: those asked for by name; without names the quick ones, or all."""
    named = full or workloads is not None or problems is not None
    return [
        (name, problem)
        for name, workload in WORKLOADS.items()
        if workloads is None or name in workloads
        for problem in (workload.problems if named else workload.quick)
        if problems is None or problem in problems
    ]
