"""The benchmark of the audit runs, and finds what it is about."""

from experiments.benchmarks import audit


def test_right_models_are_right_and_the_fault_is_found():
    lines = audit.rows(small=True)
    assert len(lines) == len(audit.MODELS)
    assert all("| right |" in line for line in lines[:-1])
    assert "| wrong in 5 |" in lines[-1]
