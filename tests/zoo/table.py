"""What `hog.verify` says of the zoo, as the table of docs/zoo.md: `python -m tests.zoo.table`."""

import re
from typing import NamedTuple

import torch

import hoglib as hog
from tests.zoo import ZOO
from tests.zoo.published import PUBLISHED


class Judged(NamedTuple):
    """The verdict on one Function: the rows that name its mistake, and those that failed."""

    name: str
    wanted: str  # "fail", "warn" or "right"
    named: list[str]
    failed: list[str]
    texts: list[str]  # of all rows that are not passed
    raised: list[str]  # what checks raised, which is no verdict

    @property
    def right(self) -> bool:
        """Whether the verdict is the right one, and the mistake, if there is one, named."""
        if self.wanted == "right":
            return not self.failed
        return bool(self.named) and bool(self.failed) == (self.wanted == "fail")


def judge(name, function, make, wanted, says, options):
    torch.manual_seed(0)
    report = hog.verify(function, make(), **options)
    rows = [row for row in report if row.status == wanted]
    named = [
        row.name for row in rows if all(word in f"{row.name} {row.text}".lower() for word in says)
    ]
    return Judged(
        name, wanted, named if says else [], [row.name for row in report.failed],
        [f"{row.status} {row.name}: {row.text}" for row in report if row.status in ("fail", "warn")],
        [row.text for row in report if row.name == "circumstances"],
    )  # fmt: skip


def mistake(exhibit):
    e = exhibit
    return judge(e.name, e.wrong, e.inputs, e.verdict, e.says, e.options)


def twin(exhibit):
    e = exhibit
    return judge(e.name, e.right, e.inputs, "right", (), e.options)


def specimen(s):
    return judge(s.name, s.function, s.inputs, s.verdict, s.says, s.options)


def grouped(judged):
    """Row of the report: the mistakes that it names, of which warnings are marked."""
    rows = {}
    for one in judged:
        wrong = "" if one.right else " (MISSED)"
        warned = " (warn)" * (one.wanted == "warn")
        # "detached: .item()" and "detached: .data" are one kind of row
        row = re.sub(
            r"^(saved: ctx|detached:|backward applies).*", r"\1 ...", (one.named or ["none"])[0]
        )
        rows.setdefault(row, []).append(one.name + warned + wrong)
    return [f"| `{row}` | {'; '.join(names)} |" for row, names in rows.items()]


def markdown():
    mistakes, twins = [mistake(e) for e in ZOO], [twin(e) for e in ZOO]
    published = [specimen(s) for s in PUBLISHED]
    faulty = [one for one in published if one.wanted != "right"]
    right = [one for one in published if one.wanted == "right"]
    alarms = [one.name for one in [*twins, *right] if not one.right]
    found = sum(one.right for one in [*mistakes, *faulty])
    return "\n".join(
        [
            "| named by the row | mistakes |", "|---|---|", *grouped(mistakes), "",
            "| named by the row | published Functions that are wrong |", "|---|---|", *grouped(faulty), "",
            f"Named: {found} of {len(mistakes) + len(faulty)} mistakes. "
            f"False alarms: {len(alarms)} of {len(twins) + len(right)}. {'; '.join(alarms)}".strip(),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(markdown())
