"""Private names of torch: one table has them all, and without any of them nothing is wrong in silence."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hoglib as hog
from hoglib import ring
from hoglib._core.torch_api import torch_private
from hoglib._core.torch_api.torch_private import TABLE, holder, private, require
from hoglib.errors import UnsupportedError
from hoglib.verification import entry_points
from tests.long_tail import FULL

PACKAGE = Path(hog.__file__).parent
FILES = {f: ast.parse(f.read_text()) for f in PACKAGE.rglob("*.py") if f.name != "torch_private.py"}
# Not torch's: Python's own, and attributes that hoglib or Lightning give their objects.
OTHERS = {
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_getframe",
    "_DummyThread",
    "_current_frames",
    "_batches_that_stepped",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return node, parts[::-1]


def names_of_torch(tree):
    """The private names that a file reaches from torch by its imports."""
    known = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            pairs = [(a.name, a.asname) for a in node.names if a.name.split(".")[0] == "torch"]
            known |= {asname: name for name, asname in pairs if asname}
            yield from (name for name, _ in pairs)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            yield from (f"{node.module}.{a.name}" for a in node.names)
    for node in ast.walk(tree):
        root, parts = dotted(node)
        if parts and isinstance(root, ast.Name) and root.id in known:
            yield ".".join([known[root.id], *parts])


def asked_for(tree):
    """The names that a file gives to `private`, `holder` and `refuse`."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    own = (c for c in calls if getattr(c.func, "id", "") in ("private", "holder", "refuse"))
    yield from (c.args[0].value for c in own if "." in c.args[0].value)  # others are called so, too


def attributes(tree):
    """The private attributes of objects that a file reads, also by their names as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def own_names():
    """Those that hoglib itself defines."""
    for tree in FILES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield from node.value.split() if node.value.startswith("_") else ()


def test_private_names_are_reached_by_the_table_alone():
    found = {(f.name, n) for f, tree in FILES.items() for n in names_of_torch(tree)}
    assert {(f, n) for f, n in found if any(map(is_private, n.split(".")))} == set()


def test_each_row_is_used_and_each_use_has_a_row():
    asked = {name for tree in FILES.values() for name in asked_for(tree)}
    assert asked - TABLE.keys() == set()
    of_torch = {name for name in TABLE if name.startswith("torch.")}
    assert of_torch - asked == set()
    read = {name for tree in FILES.values() for name in attributes(tree)}
    assert {n for n in TABLE.keys() - of_torch if n.partition(".")[2] not in read} == set()


def test_private_attributes_have_rows():
    rows = {name.rpartition(".")[2] for name in TABLE}
    loads = {
        (f.name, node.attr)
        for f, tree in FILES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and isinstance(node.ctx, ast.Load)
    }
    known = rows | OTHERS | set(own_names())
    assert {(f, n) for f, n in loads if n not in known} == set()


def test_every_probe_holds():
    assert [row.name for row in torch_private.failing()] == []


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.delattr(torch._C._functorch, "get_unwrapped")
    return private("torch._C._functorch.get_unwrapped")


USES = {
    "call": lambda one: one(1),
    "attribute": lambda one: one.name,
    "attribute with a default": lambda one: getattr(one, "_name", None),
    "isinstance": lambda one: isinstance(1, one),
    "issubclass": lambda one: issubclass(int, one),
    "iteration": lambda one: list(one),
    "truth": lambda one: bool(one),
    "comparison": lambda one: one == 1,
    "membership": lambda one: 1 in one,
    "item": lambda one: one["x"],
    "subclass": lambda one: type(one)("Mode", (one,), {})(),
    "required": require,
}


def test_what_is_missing_refuses_all_use(missing):
    text = r"`torch\._C\._functorch\.get_unwrapped` .* calls inside torch\.func.*hoglib check"
    for use in USES.values():
        with pytest.raises(UnsupportedError, match=text):
            use(missing)
    assert private("torch._C._functorch.get_unwrapped", None) is None
    with pytest.raises(KeyError):
        private("torch._C.no_row")
    assert [row.name for row in torch_private.failing() if "unwrapped" in row.name] != []


def test_what_holds_a_value_that_changes(monkeypatch):
    name = "torch.autograd.forward_ad._current_level"
    assert holder(name) is torch.autograd.forward_ad
    monkeypatch.delattr(torch.autograd.forward_ad, "_current_level")
    with pytest.raises(UnsupportedError, match="_current_level"):
        _ = holder(name)._current_level


def test_a_newer_torch_is_told_once(monkeypatch, recwarn):
    monkeypatch.setattr(ring, "IS_NEW_TORCH", True)
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="hoglib was run on torch up to .*`hoglib check`"):
        hog.hvp(lambda x: (x**3).sum(), x, x)
    hog.hvp(lambda x: (x**3).sum(), x, x)
    assert not recwarn


def test_without_what_the_examination_needs(monkeypatch):
    class Wrong(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x**2)
        backward = staticmethod(lambda ctx, g: g.detach())

    monkeypatch.setattr(entry_points, "_LACKING", "torch._C._of_functions")
    x = torch.ones(2)
    with pytest.warns(UserWarning, match="custom Functions are not examined on torch"):
        hog.hvp(lambda x: Wrong.apply(x).sum() + (x**3).sum(), x, x)


# Each kind of name: of all derivatives, of torch.func, of forward mode, of the examination, of tracing.
SOME = (
    "torch._C._are_functorch_transforms_active",
    "torch._C._functorch.get_interpreter_stack",
    "torch.autograd.forward_ad._set_fwd_grad_enabled",
    "torch._C._set_grad_enabled",
    "torch._C._current_autograd_node",
    "torch.autograd.graph._engine_run_backward",
    "torch._subclasses.fake_tensor.FakeTensor",
)
# Torch itself, or Python, does not do without them while hoglib is imported.
UNTRIED = {
    "torch._C._nn",
    "torch._dynamo.config.patch",
    "torch._functorch.autograd_function",
    "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter",
    "torch._inductor.config",
    "torch._library.autograd",
    "torch._library.custom_ops.OPDEFS",
    "torch._library.utils.is_tensorlist_like_type",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.backends.__allow_nonbracketed_mutation",
    "torch.library._impls",
}
ALL = [name for name in TABLE if name.startswith("torch.")]


@pytest.mark.parametrize("names", [SOME, pytest.param(ALL, marks=FULL)], ids=["some", "all"])
def test_without_a_name_nothing_is_wrong_in_silence(names):
    command = [sys.executable, "-m", "tests.core.without_private_names", "", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent)
    complete, *found = map(json.loads, done.stdout.splitlines())
    assert [one["name"] for one in found] == list(names)
    assert {one["name"] for one in found if "untried" in one} <= UNTRIED
    failed = []
    for one in found:
        name = one.pop("name")
        refused = re.compile(rf"UnsupportedError: .*`{re.escape(name)}`|warns: ")
        # right, or as with all names, or refused by name
        failed += [
            (name, k, v)
            for k, v in one.items()
            if v not in ("", complete.get(k)) and not refused.match(v)
        ]
    assert failed == []
