"""Whether a number of lower precision enters float64 maths."""

import torch

from hoglib.verification import contract
from hoglib.verification._rounding import Watch
from hoglib.verification._subject import Subject
from hoglib.verification.report import Row


def row(subject: Subject) -> Row:
    name = "dtype: constants"
    if subject.dtype != torch.float64:
        return Row(name, "skip", None, "it was not checked in float64.")
    watch = Watch()
    with watch:
        subject.map(*subject.x)
    for app in subject.applications:
        try:
            contract.run_rules(app, watch)
        except Exception:  # other checks say it
            continue
    found = watch.rounded or watch.met
    if found:
        return Row(
            name, "fail", None,
            f"a constant or a step in float32 enters float64 maths: {found}. Give it the dtype of the "
            "inputs, `torch.tensor(0.1, dtype=x.dtype)`, or use a Python number.",
        )  # fmt: skip
    if watch.foreign:
        return Row(
            name, "fail" if subject.given_wide else "warn", None,
            f"a tensor of lower precision, from outside, enters float64 maths: {watch.foreign}. Pass "
            "it as an input, or convert it, `table.to(x.dtype)`.",
        )  # fmt: skip
    return Row(name, "pass")
