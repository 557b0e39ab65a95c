"""What `make mutants` changes, and which tests it runs."""

import ast

from tests.mutants import Recorded, mutants, reaching
from tests.rows import rows

TEXT = '''"""A docstring has no mutants."""
LIMIT = 2.5

def f(x: int, *, low=-1) -> int:
    """Neither has this one."""
    if low <= x and not x == 3:
        x += 1
        return max(x, low)
    return x
'''
FILE = "hoglib/none.py"
CHANGES = [  # of each kind one
    ("2.5 -> 5.0", False, 0), ("2.5 -> -2.5", False, 0),
    ("-1 -> 1", True, 6), ("1 -> 2", True, 6), ("low <= x -> low < x", True, 6), ("low <= x -> low > x", True, 6),
    ("low <= x and (not x == 3) -> low <= x or not x == 3", True, 6),
    ("low <= x and (not x == 3) -> low <= x", True, 6), ("low <= x and (not x == 3) -> False", True, 6),
    ("not x == 3 -> x == 3", True, 6), ("x == 3 -> x != 3", True, 6), ("3 -> 4", True, 6), ("x += 1 -> pass", True, 7),
    ("max -> min", True, 8), ("return x -> return None", True, 9),
]  # fmt: skip


@rows("change, inside, line", CHANGES)
def test_a_change_and_the_tests_that_can_notice_it(change, inside, line):
    tree, every = mutants(FILE, TEXT)
    mutant = next(m for m in every if m.label.endswith(f": {change}"))
    before = ast.unparse(tree)
    mutant.put()
    assert ast.unparse(tree) != before
    compile(tree, FILE, "exec")
    assert mutant.place.inside == inside
    tests = [
        Recorded("tests/far.py", "far", 1.0, {FILE: 1 << line}),
        Recorded("tests/none.py/test_slow.py", "slow", 3.0, {FILE: 1 << line}),
        Recorded("tests/none.py/test_fast.py", "fast", 2.0, {FILE: 1 << line}),
        Recorded("tests/none.py/test_other.py", "other", 1.0, {FILE: 1 << 20}),
    ]
    if inside:
        assert [test.name for test in reaching(mutant, tests, 4.0)] == ["fast", "slow"]
        assert len(reaching(mutant, tests, 6.0)) == 3
    else:
        assert mutant.place.names == {"LIMIT"}


def test_what_has_no_mutants():
    _, every = mutants(FILE, TEXT)
    assert not any("docstring" in m.label or "int" in m.label for m in every)
    assert len({m.label for m in every}) == len(every)


def test_a_diff_has_the_change_alone():
    _, every = mutants(FILE, TEXT)
    assert all(TEXT.encode().splitlines()[m.old.lineno - 1][m.old.col_offset :] for m in every)
    for m in every:
        if isinstance(m.old, ast.expr):
            assert ast.unparse(ast.parse(ast.get_source_segment(TEXT, m.old))) == ast.unparse(m.old)
