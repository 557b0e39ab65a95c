"""What is compared of meta-gradients: every way to the same one."""

from functools import partial

from experiments.benchmarks.meta import with_hoglib, with_jax, with_peers, with_torch
from experiments.benchmarks.meta.tasks import LEARNERS, STEPS, checked, learner, long_loop
from experiments.benchmarks.workload import Method, Workload

LOOP, CHOSEN = "loop by hand", "hoglib.MAML"
FORCED = {"loop": "hoglib.MAML, loop", "vmap": "hoglib.MAML, vmap"}
# whose inner loop, whole, compiles in a minute; that of a convolutional network takes five
WHOLE = ("sinusoid", "sinusoid, LinearAct", "MLP")
way = partial(Method, truth="meta-gradient")
library = partial(way, column="other")
ours = partial(way, ours=True)


def compiled(how: str, problems: tuple[str, ...] | None = None) -> Method:
    make = with_hoglib.maml(compile=how)
    return ours(make, compiled=True, column="compiled", called=how, problems=problems)


META_GRADIENT: dict[str, Method] = {
    LOOP: way(with_torch.by_hand),
    CHOSEN: ours(with_hoglib.maml(), column="hoglib", beside=tuple(FORCED.values())),
    FORCED["loop"]: ours(with_hoglib.maml(over_tasks="loop")),
    FORCED["vmap"]: ours(with_hoglib.maml(over_tasks="vmap")),
    "vmap(grad) by hand": library(with_torch.vmap_of_grad, called="torch.func"),
    "grad(vmap) by hand": way(with_torch.grad_of_vmap),
    "higher": library(with_peers.higher, called="higher"),
    "TorchOpt": library(with_peers.torchopt, called="TorchOpt"),
    'hoglib.MAML, compile="eager"': compiled("eager"),
    'hoglib.MAML, compile="inductor"': compiled("inductor", problems=WHOLE),
    "JAX jit(vmap(grad))": way(
        with_jax.vmap_of_grad, compiled=True, library="jax", column="jax", called="JAX"
    ),
}
STORED = "store by hand"
MANY_STEPS: dict[str, Method] = {
    STORED: way(with_torch.by_hand),
    "torch.utils.checkpoint by hand": way(with_torch.checkpointed_by_hand),
    'hoglib, memory="store"': ours(with_hoglib.maml(memory="store")),
    'hoglib, memory="remat"': ours(with_hoglib.maml(memory="remat")),
    'hoglib, memory="checkpoint"': ours(with_hoglib.maml(memory="checkpoint")),
}
WORKLOADS = {
    "meta-gradient": Workload(
        "a meta-gradient",
        tuple(LEARNERS),
        META_GRADIENT,
        learner,
        by_hand=LOOP,
        quick=("sinusoid",),
        page="meta",
        brief="MAML's meta-gradient",
        seconds=6.0,
    ),
    "steps": Workload(
        "a meta-gradient of one task, by inner steps",
        tuple(map(str, STEPS)),
        MANY_STEPS,
        long_loop,
        by_hand=STORED,
        quick=("5", "20", "80"),
        page="meta",
        memory="allocated",
        checked=checked,
        seconds=5.0,
    ),
}
