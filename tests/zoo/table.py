"""What `hog.verify` says of the zoo, as the table of docs/zoo.md: `python -m tests.zoo.table`."""

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


def markdown():
    lines = ["| mistake | verdict | named by the row | its right twin |", "|---|---|---|---|"]
    mistakes, twins = [mistake(e) for e in ZOO], [twin(e) for e in ZOO]
    for wrong, right in zip(mistakes, twins, strict=True):
        named = f"`{wrong.named[0]}`" if wrong.named else "not named"
        verdict = wrong.wanted if wrong.right else "MISSED"
        alarm = "no row fails" if right.right else "FALSE ALARM"
        lines.append(f"| {wrong.name} | {verdict} | {named} | {alarm} |")
    lines += ["", "| published Function | verdict | named by the row |", "|---|---|---|"]
    published = [specimen(s) for s in PUBLISHED]
    for one in published:
        named = f"`{one.named[0]}`" if one.named else ""
        verdict = one.wanted if one.right else "MISJUDGED"
        lines.append(f"| {one.name} | {verdict} | {named} |")
    faulty = [*mistakes, *(one for one in published if one.wanted != "right")]
    sound = [*twins, *(one for one in published if one.wanted == "right")]
    found = sum(one.right for one in faulty)
    alarms = sum(not one.right for one in sound)
    lines += [
        "",
        f"Named: {found} of {len(faulty)} mistakes. False alarms: {alarms} of {len(sound)}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(markdown())
