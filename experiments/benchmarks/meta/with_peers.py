"""The same by higher and by TorchOpt, as their examples of MAML have it: task by task."""

import torch

from experiments.benchmarks.critics import taken
from experiments.benchmarks.meta.tasks import Learner
from experiments.benchmarks.meta.with_torch import Call, Found
from experiments.benchmarks.with_torch import with_plain_attention
from experiments.benchmarks.workload import peer


@with_plain_attention
def higher(learner: Learner) -> Call:
    library, learner = peer("higher"), learner.apart()
    model, criterion = learner.model, learner.criterion
    optimizer = torch.optim.SGD(model.parameters(), lr=learner.inner_lr)

    def run() -> Found:
        total = torch.zeros(())
        for support, query in learner.each():
            context = library.innerloop_ctx(model, optimizer, copy_initial_weights=False)
            with context as (patched, inner):
                for _ in range(learner.inner_steps):
                    inner.step(criterion(patched(support[0]), support[1]))
                value = criterion(patched(query[0]), query[1]) / learner.count
                value.backward()
            total = total + value.detach()
        return taken(total, model)

    return run


@with_plain_attention
def torchopt(learner: Learner) -> Call:
    library, learner = peer("torchopt"), learner.apart()
    model, criterion = learner.model, learner.criterion
    inner = library.MetaSGD(model, lr=learner.inner_lr)

    def run() -> Found:
        total = torch.zeros(())
        weights = library.extract_state_dict(model, by="reference", detach_buffers=True)
        state = library.extract_state_dict(inner, by="reference")
        for support, query in learner.each():
            for _ in range(learner.inner_steps):
                inner.step(criterion(model(support[0]), support[1]))
            value = criterion(model(query[0]), query[1]) / learner.count
            value.backward()
            total = total + value.detach()
            library.recover_state_dict(model, weights)
            library.recover_state_dict(inner, state)
        return taken(total, model)

    return run
