"""What is compared: every way to the same meta-gradient, by name. The first is the unit of time."""

from collections.abc import Callable, Mapping

from experiments.benchmarks.meta import with_hoglib, with_jax, with_peers, with_torch
from experiments.benchmarks.meta.tasks import Learner
from experiments.benchmarks.meta.with_torch import Call

Make = Callable[[Learner], Call]

LOOP, CHOSEN = "loop by hand", "hoglib.MAML"
FORCED = {"loop": "hoglib.MAML, loop", "vmap": "hoglib.MAML, vmap"}
JAX = "JAX jit(vmap(grad))"
COMPILED = {way: f'hoglib.MAML, compile="{way}"' for way in ("eager", "step", "inductor")}
META_GRADIENT: dict[str, Make] = {
    LOOP: with_torch.by_hand,
    CHOSEN: with_hoglib.maml(),
    FORCED["loop"]: with_hoglib.maml(over_tasks="loop"),
    FORCED["vmap"]: with_hoglib.maml(over_tasks="vmap"),
    "vmap(grad) by hand": with_torch.vmap_of_grad,
    "grad(vmap) by hand": with_torch.grad_of_vmap,
    "higher": with_peers.higher,
    "TorchOpt": with_peers.torchopt,
    **{name: with_hoglib.maml(compile=way) for way, name in COMPILED.items()},
    JAX: with_jax.vmap_of_grad,
}
STORED = "store by hand"
MANY_STEPS: dict[str, Make] = {
    STORED: with_torch.by_hand,
    "torch.utils.checkpoint by hand": with_torch.checkpointed_by_hand,
    'hoglib, memory="store"': with_hoglib.maml(memory="store"),
    'hoglib, memory="remat"': with_hoglib.maml(memory="remat"),
    'hoglib, memory="checkpoint"': with_hoglib.maml(memory="checkpoint"),
}
METHODS: Mapping[str, Mapping[str, Make]] = {"meta-gradient": META_GRADIENT, "steps": MANY_STEPS}
PEERS = ["higher", "torchopt", "jax"]  # the distributions that are neither torch nor hoglib
# whose inner loop, whole, compiles in a minute; that of a convolutional network takes five
WHOLE = ("sinusoid", "sinusoid, LinearAct", "MLP")


def methods_for(workload: str, problem: str) -> dict[str, Make]:
    """What is compared on a learner, or for a number of steps."""
    waits = workload == "meta-gradient" and problem not in WHOLE
    return {
        name: make
        for name, make in METHODS[workload].items()
        if not (waits and name == COMPILED["inductor"])
    }
