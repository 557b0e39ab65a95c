"""The short table and its picture: ratios to what is by hand, who is in bold, a GPU's columns, the pages."""

import json

import pytest

from experiments.benchmarks import __main__ as command
from experiments.benchmarks import pages, report, summary
from experiments.benchmarks.processes import ROOT

MACHINE = {
    "processor": "abacus", "cores": 2, "threads": 1, "system": "Linux", "python": "3", "torch": "2",
    "hoglib": "0", "gpu": None, "peers": {"jax": None, "other": "1.0"}, "date": "2026-01-01",
}  # fmt: skip


def row(ratio, column="", called="", first=None, **more):
    """As measured: times to a unit of 10 ms."""
    found = {"ours": column in ("hoglib", "compiled"), "column": column, "called": called}
    found |= {"status": "ok", "message": None, "first_seconds": first, "peak_bytes": 2**20}
    spread = {"median": ratio, "low": 0.9 * ratio, "high": 1.1 * ratio}
    times = {"seconds": {"median": ratio / 100}, "ratio": spread, "repeats": 3, "products": None}
    return found | times | more


def untimed(status, message, column, called):
    found = row(1.0, column, called)
    for name in ("seconds", "ratio", "repeats"):
        del found[name]
    return found | {"status": status, "message": message}


def measured(methods, problem="MLP", device="cpu", **more):
    found = {"workload": "hvp", "title": "one product", "brief": "product", "page": "curvature"}
    found |= {"problem": problem, "device": device, "by_hand": "hand", "methods": methods}
    return found | {"unit": {"name": "plain gradients"}} | more


def cells(methods, **more):
    (line,) = summary.table({"workloads": [measured(methods, **more)]}).splitlines()[2:]
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def test_all_is_beside_what_is_by_hand_whatever_the_unit_was():
    found = cells(
        {
            "hand": row(2.5),
            "ours": row(2.6, "hoglib"),
            "slower": row(5.0, "hoglib", "operator"),
            "graph": row(2.0, "compiled", "step", first=12.3),
            "another": row(2.2, "compiled", "eager", first=0.2),
            "theirs": row(3.0, "other", "curvlinops"),
            "nearly": row(1.85, "other", "PyHessian"),
            "faster": row(1.75, "other", "higher"),  # than the better of ours by a tenth
            "unnamed": row(0.1),
            "jax": row(1.5, "jax", "JAX", first=1.6),
        }
    )
    assert found[:4] == ["product, MLP", "25 ms", "1.04", "0.80, step (12 s)"]
    assert found[4:] == ["curvlinops 1.20, PyHessian 0.74, **higher 0.70**", "**0.60 (2 s)**"]


def test_why_there_is_no_time_is_said():
    found = cells(
        {
            "hand": row(2.5),
            "ours": row(3.0, "hoglib", "hvp"),
            "wrong": untimed("wrong", "wrong by 3e-3", "other", "curvlinops"),
            "absent": untimed("missing", "missing: higher is not installed", "other", "higher"),
            "raises": untimed("raises", "raises: ValueError: no", "other", "PyHessian"),
            "jax": untimed("missing", "missing: jax is not installed", "jax", "JAX"),
        }
    )
    others = "curvlinops wrong by 3e-3, higher missing, PyHessian raises"
    assert found == ["product, MLP", "**25 ms**", "1.20, hvp", "", others, "missing"]


def test_without_a_right_method_by_hand_there_are_no_ratios():
    hand = untimed("raises", "raises: RuntimeError: no second derivative", "", "")
    found = cells({"hand": hand, "ours": row(2.0, "hoglib")})
    assert found == ["product, MLP", "raises: RuntimeError: no second derivative", "", "", "", ""]


def results():
    methods = {
        "hand": row(2.0), "ours": row(2.0, "hoglib"), "graph": row(1.0, "compiled", first=3.0),
        "theirs": row(4.0, "other", "curvlinops"), "jax": row(1.0, "jax", "JAX", first=3.0),
    }  # fmt: skip
    kept = {"store by hand": row(1.0), 'hoglib, memory="remat"': row(1.5, ours=True)}
    meta = {"workload": "steps", "brief": "", "page": "meta"}
    steps = [measured(kept, count, **meta) for count in ("5", "20")]
    long = measured(methods, workload="meta-gradient", brief="MAML", page="meta")
    return {
        "machine": MACHINE,
        "workloads": [measured(methods), measured(methods, device="cuda"), long, *steps],
    }


def test_every_page_is_written_from_one_file_of_results(tmp_path, monkeypatch, capsys):
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    start, end = report.MARKS
    names = {"benchmarks.md", "benchmark-details.md", "meta-benchmarks.md"}
    for name in names:
        (docs / name).write_text(f"before\n\n{start}\n\nold\n\n{end}\n\nafter\n")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "results.json").write_text(json.dumps(results()))
    for _ in range(2):
        command.main(["--render", "--write-docs", "--output", str(tmp_path / "runs")])
    texts = {name: (docs / name).read_text() for name in names}
    for text in texts.values():
        assert text.startswith("before\n")
        assert text.endswith("after\n")
        assert "old" not in text
        assert "abacus" in text
    short, long, meta = (
        texts[name] for name in ("benchmarks.md", "benchmark-details.md", "meta-benchmarks.md")
    )
    timed = "20 ms | 1.00 | 0.50 (3 s) |"  # on the CPU and on the GPU
    assert f"| product, MLP | {timed} curvlinops 2.00 | 0.50 (3 s) | {timed}\n" in short
    assert f"| MAML, MLP | {timed} curvlinops 2.00 | 0.50 (3 s) |  |  |  |\n" in short
    assert long.count("| theirs | 4.00 (3.60-4.40), 1 MiB |") == 1
    assert "one task, conv4-32; inner steps: | 5 | 20 |" in meta
    assert "| time of a meta-gradient, to the loop by hand | MLP |" in meta
    assert "abacus, 2 cores, each process on one core with 1 thread, Linux" in short
    assert "jax (missing), other 1.0" in short
    drawn = {path.name for path in (docs / "images").iterdir()}
    assert drawn == {"benchmarks.png", "meta-memory.png"}
    assert f"Written: docs/{'benchmark-details.md'}" in capsys.readouterr().out


def test_the_real_pages_have_the_marks(tmp_path):
    for name in pages.contents(results()):
        text = (ROOT / "docs" / name).read_text()
        assert text.count(report.MARKS[0]) == text.count(report.MARKS[1]) == 1, name
    page = tmp_path / "page.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="expected the marks"):
        report.put(page, [])
