"""The steps of a critic with a gradient penalty that are compared."""

from functools import partial

import torch

import hoglib as hog
from experiments.benchmarks import critic_steps, critics_in_jax
from experiments.benchmarks.critic_steps import Loss, steps
from experiments.benchmarks.critics import CRITICS, critics
from experiments.benchmarks.workload import Method, Workload

BY_HAND = "double backward by hand"


def ways(penalty: str, hand: Loss, ours: Loss) -> dict[str, Method]:
    step = partial(Method, truth=penalty)
    return {
        BY_HAND: step(steps(hand)),
        f"hoglib.penalties.{penalty}": step(steps(ours), ours=True, column="hoglib"),
        f"hoglib.penalties.{penalty}, hoglib.compiled_loss": step(
            steps(ours, hog.compiled_loss), ours=True, compiled=True, column="compiled"
        ),
        "JAX jit(value_and_grad)": step(
            critics_in_jax.step(penalty), compiled=True, library="jax", column="jax", called="JAX"
        ),
    }


step_of_critic = partial(
    Workload,
    problems=tuple(CRITICS),
    make=critics,
    by_hand=BY_HAND,
    page="penalties",
    memory="allocated",
)
WORKLOADS = {
    "r1": step_of_critic(
        "a critic's step: loss, R1, and the gradient by all parameters",
        quick=("small", "MLP", "CNN"),
        methods=ways("r1", critic_steps.with_r1_by_hand, critic_steps.with_r1)
        | {
            "hoglib.penalties.r1, micro_batch": Method(
                steps(critic_steps.with_r1_in_pieces), ours=True, truth="r1"
            ),
            # not of a penalty that draws points: inductor draws other ones
            "torch.compile of hoglib.penalties.r1": Method(
                steps(critic_steps.with_r1, partial(torch.compile, fullgraph=True)),
                ours=True,
                truth="r1",
                compiled=True,
            ),
        },
        brief="critic's step with R1",
    ),
    "wgan_gp": step_of_critic(
        "a critic's step: Wasserstein loss, WGAN-GP, and the gradient by all parameters",
        quick=("small", "MLP"),
        methods=ways("wgan_gp", critic_steps.with_wgan_gp_by_hand, critic_steps.with_wgan_gp),
        brief="critic's step with WGAN-GP",
    ),
}
