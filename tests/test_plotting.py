"""Pictures and tables of results have the numbers of the results, and leave matplotlib as it was."""

import io
import sys
from html.parser import HTMLParser
from math import inf, nan

import pytest
import torch

import hoglib as hog
from hoglib.curvature import CriticalSharpness, KFACError, LinearOperator, hessian_spectrum
from hoglib.curvature.algebra.estimates import Estimate
from hoglib.curvature.algebra.linear_systems import Solution
from hoglib.errors import ArgumentTypeError, MissingDependencyError
from hoglib.meta import Hypergradient, LeaveKOut
from hoglib.verification import Row
from tests.rows import rows

pytest.importorskip("matplotlib")
from matplotlib import pyplot, rcParams
from matplotlib.figure import Figure

# fmt: off
VALUES = torch.tensor([-4.0, -1e-5, 2e-3, 0.1, 900.0], dtype=torch.float64)
PAIRS = LinearOperator.from_dense(VALUES.diag()).eigsh(5)
SPECTRUM = hessian_spectrum(lambda p, _: (VALUES * p * p).sum() / 2, torch.zeros(5).double(), None, k=2, steps=5)
DENSITY = SPECTRUM.density
CHANGES = LeaveKOut(torch.tensor([1.0, 2.0, nan]), torch.tensor([1.5, 2.5, 0.0]), torch.zeros(3, 2), 0.5)
ESTIMATE = Estimate(torch.tensor([1.0, -2.0, 300.0]), torch.tensor([0.1, inf, 1.0]))
CRITICAL = CriticalSharpness(5.0, 0.4, 5, True, ((0.0, 1.0), (9.0, 2.0), (0.25, 0.5), (0.4, 1.0), (99.0, inf)))
NAMED = r"f_<b>$\y$ & z"  # neither markup nor mathematics
REPORT = hog.Report(NAMED, [
    Row("first", "pass", 1e-9, "right"), Row(NAMED, "fail", 0.5, f"wrong:\n  {NAMED}"), Row("runs", "warn", None, "<i>"),
    Row("none", "pass", 0.0), Row("skipped", "skip", None, "why"), *(Row(f"inf {i}", "pass", inf) for i in range(50)),
])
DISTANCES = KFACError(*(Estimate(torch.tensor(x), torch.tensor(0.1)) for x in (0.3, 0.2, 0.4)))
DISTANCES.layers = {NAMED: Estimate(torch.tensor(0.7), torch.tensor(inf)), "dead": Estimate(*torch.tensor([nan, nan]))}
# fmt: on


def monitor(*history):
    lightning = pytest.importorskip("hoglib.lightning")
    found = lightning.CurvatureMonitor()
    found.history = [lightning.Measurement(*one) for one in history]
    return found


# a result -> some of the lines of its picture
PICTURES = {
    "density": (lambda: DENSITY, [(DENSITY.grid, DENSITY.density)]),
    "spectrum": (lambda: SPECTRUM, [(VALUES[[0, 1, 3, 4]], [0.03] * 4)]),
    "eigenpairs": (lambda: PAIRS, [(range(1, 6), VALUES.flip(0))]),
    "nothing measured": (monitor, []),
    "measured": (lambda: monitor((0, "", SPECTRUM, 1.0, 5.0), (8, "", SPECTRUM, 2.5)),
                 [([0, 8], [900.0] * 2), ([0, 8], [-4.0] * 2), ([0], [5.0]), ([8], [900.0])]),
    "several measured": (lambda: monitor((0, NAMED, SPECTRUM), (0, "_b", SPECTRUM)), [([0], [900.0])] * 2),
    "distances": (lambda: DISTANCES, [([0.7], [1]), ([0.4], [2]), ([0.3], [3]), ([0.2], [4])]),
    "changes": (lambda: CHANGES, [(CHANGES.predicted, CHANGES.actual)]),
    "report": (lambda: REPORT, [([0.5], [0])]),
    "an estimate": (lambda: ESTIMATE, [(range(3), [1.0, -2.0, 300.0])]),
    "one number": (lambda: Estimate(torch.tensor(2.0), torch.tensor(inf)), [([0], [2.0])]),
    "a critical step": (lambda: CRITICAL, [([0, 0.25, 0.4, 9.0], [1.0, 0.5, 1.0, 2.0])]),
    "no critical step": (lambda: CRITICAL._replace(value=nan, found=False, tried=((0.0, 1.0), (0.4, inf))), [([0], [1.0])]),
    "an empty report": (lambda: hog.Report("f", []), []),
}  # fmt: skip


@rows("name", PICTURES)
def test_a_picture_has_the_numbers_of_its_result(name, monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda: pytest.fail("a window was opened"))
    make, lines = PICTURES[name]
    given, settings, open_before = Figure().subplots(), dict(rcParams), pyplot.get_fignums()
    assert make().plot(given) is given
    assert pyplot.get_fignums() == open_before
    made = make().plot()
    for ax in (given, made):
        drawn = [[*map(float, line.get_xdata()), *line.get_ydata()] for line in ax.lines]
        for x, y in lines:
            assert any(
                pytest.approx([*map(float, x), *map(float, y)], nan_ok=True) == line
                for line in drawn
            )
        ax.figure.savefig(io.BytesIO())  # each label can be drawn
    pyplot.close(made.figure)
    assert dict(rcParams) == settings


def test_what_has_no_place_on_a_logarithmic_axis_is_written_and_scales_fit_the_sizes():
    ax = REPORT.plot(Figure().subplots())
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[:4] == [NAMED, "runs: warn", "inf 0: inf", "inf 1: inf"]
    assert (ax.get_ylabel(), len(labels)) == ("the worst 40 of 54", 40)
    assert PAIRS.plot(Figure().subplots()).get_yscale() == "symlog"
    positive = LinearOperator.from_dense(VALUES.abs().diag()).eigsh(5)
    assert positive.plot(Figure().subplots()).get_yscale() == "log"
    assert DISTANCES.plot(Figure().subplots()).get_xscale() == "linear"


def test_a_report_in_a_notebook_is_a_table_of_escaped_text():
    parts, cells = [], HTMLParser()
    cells.handle_data, cells.handle_starttag = parts.append, lambda tag, _: parts.append(f"[{tag}]")
    cells.feed(REPORT._repr_html_())
    head, _, *lines = "".join(parts).split("[tr]")
    assert head == f"[b]{NAMED}: WRONG, by 1 of 54 checks.[table]"
    assert lines[0] == f"[td]{NAMED}[td]fail[td]5e-01[td]wrong:\n  {NAMED}"
    assert lines[1] == "[td]runs[td]warn[td][td]<i>"


def test_a_result_in_a_notebook_is_a_table_of_its_fields():
    text = Estimate(torch.tensor(1.5), torch.zeros(900, 3))._repr_html_()
    assert text.startswith("<b>Estimate</b><table><tr><td>value</td>")
    assert "tensor(1.5000)" in text
    assert "&lt;a float32 tensor of shape (900, 3)&gt;" in text
    assert "<td>residuals</td>" in PAIRS._repr_html_()
    assert repr(CRITICAL) == "CriticalSharpness(value=5.0, step=0.4, passes=5, found=True)"


def test_tables_are_data_frames():
    pytest.importorskip("pandas")
    assert list(REPORT.to_dataframe().itertuples(index=False, name=None))[:2] == list(REPORT)[:2]
    assert DISTANCES.to_dataframe().layer.tolist() == [NAMED, "dead"]


def test_what_is_missing_or_wrong_is_told(monkeypatch):
    with pytest.raises(ArgumentTypeError, match=r"ax: expected one Axes of .*, got ndarray"):
        PAIRS.plot(Figure().subplots(2))
    for name in ("matplotlib.pyplot", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib to .* 'hoglib\[plot\]'`"):
        PAIRS.plot()
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        REPORT.to_dataframe()


def test_the_repr_of_large_results_is_short():
    wide, tree = torch.zeros(900, 3), {"w": torch.zeros(4, 5), "b": torch.zeros(5)}
    for large in (
        Estimate(wide, wide),
        Solution(wide, wide > 0, 3, 9),
        CHANGES._replace(subsets=wide),
    ):
        assert len(repr(large)) < 250
    text = repr(Hypergradient(torch.tensor(1.5), wide, tree, None))
    assert (
        "=<a float32 tensor of shape (900, 3)>, params=<dict of 25 numbers>, residual=None)" in text
    )
    small = Estimate(torch.tensor(1.5), torch.ones(2))
    assert repr(small) == "Estimate(value=tensor(1.5000), error=tensor([1., 1.]))"
