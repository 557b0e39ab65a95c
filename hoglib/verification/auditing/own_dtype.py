"""A requested route in the dtype of the parameters: is it there, is it finite, how far is it off?"""

import torch

from hoglib import _tree
from hoglib._differences import distance
from hoglib._leaves import Vector
from hoglib._substitution import lingering
from hoglib.verification.auditing import telling
from hoglib.verification.auditing.judging import Judge, Verdict
from hoglib.verification.auditing.locating import Fault
from hoglib.verification.auditing.problem import Problem
from hoglib.verification.auditing.routes import Route
from hoglib.verification.auditing.setting import Setting
from hoglib.verification.auditing.telling import Telling
from hoglib.verification.report import Row

KEEPS = {torch.float32: 0.03, torch.float16: 0.3, torch.bfloat16: 0.3}  # of a product


def row(
    problem: Problem, words: Telling, route: Route, at: Vector, product: Vector | None
) -> tuple[Row | None, list[Fault], str]:
    """product: what it gives in float64, at these leaves, if that can be compared.

    At the parameters themselves it must be there and finite; at the leaves it is compared.
    """
    dtype = problem.leaves[0].dtype
    title = str(dtype).removeprefix("torch.")
    name, what = f"{route.row}, in {title}", f"{telling.second(route)}, in {title} at params,"

    def ask(judge: Judge) -> Verdict:
        return judge.finite(route)

    with Setting(problem, double=False) as here, lingering():
        verdict = ask(here.judge())
        if verdict.at_fault:
            faults = list(here.locator.faults(ask, verdict))
            text = f"It {telling.off(verdict)} at params, in {words.where(faults)}."
            return Row(name, "fail", verdict.error, text), faults, what
        if dtype not in KEEPS or product is None:
            return None, [], what
        here.move_to([x.to(like.dtype) for x, like in zip(at, here.given, strict=True)])
        narrow = here.product(route)
    if narrow is None:  # there, and not beside: of no interest
        return None, [], what
    size = max(float(_tree.norm(product)), 1e-300)
    error = distance([x.double() for x in narrow], product) / size
    if error < KEEPS[dtype]:
        return Row(name, "pass", error), [], what
    text = (
        f"{telling.second(route)} is off by {error:.0%} in {title} from what it is in float64: by "
        "rounding, a cast to half precision inside, or a constant in another dtype. Compute it in "
        "float64, or look for autocast and .to() in the model."
    )
    return Row(name, "warn", error, text), [], what
