"""What a graph cannot hold is refused, with the line that does it, and before anything is changed."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hoglib as hog
from tests.capture.models import draw
from tests.several_processes import alone

WEIGHT = nn.Parameter(draw(3))
BUFFER = draw(3)
GENERATOR = torch.Generator().manual_seed(0)
NORM = nn.BatchNorm1d(3).double()


class ByNumPy(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.exp(x.detach().numpy()))  # here

    setup_context = staticmethod(lambda ctx, inputs, output: ctx.save_for_backward(output))

    backward = staticmethod(lambda ctx, g: g * ctx.saved_tensors[0])


def by_if(x):
    if x.sum() > 0:  # here
        return x
    return -x


def by_item(x):
    return x * x.max().item()  # here


def by_tolist(x):
    return x * sum(x.tolist())  # here


def by_numpy(x):
    return torch.from_numpy(np.sin(x.numpy())) + x  # here


def by_dlpack(x):
    return x * np.from_dlpack(x).sum()  # here


def by_storage(x):
    return x * sum(x.untyped_storage().tolist())  # here


def by_comparison(x):
    return x if torch.equal(x, x + 1) else x * 2  # here


def by_formatting(x):
    return x, f"{x.sum():.3f}"  # here


def by_a_parameters_value(x):
    return x * float(WEIGHT.detach().max())  # here


def by_a_custom_function(x):
    return ByNumPy.apply(x)


def by_nonzero(x):
    return x.nonzero()  # here


def by_index(x):
    return x[x > 0]  # here


def by_unique(x):
    return x.unique()  # here


def under_grad(x):
    return torch.func.grad(lambda x: (x * x.max().item()).sum())(x)  # here


INDEX = torch.tensor(1)


def by_an_integer_tensor(x):
    return x[INDEX]  # here


MASK = torch.tensor([True, False, True])


def by_if_of_integers(x):
    return x if MASK.all() else -x  # here


def by_shape_of_integers(x):
    return x[: int(MASK.sum())]  # here


def by_tolist_of_integers(x):
    return x * sum(MASK.tolist())  # here


def by_a_mask(x):
    return x[MASK]  # here


def by_masked_select(x):
    return x.masked_select(MASK)  # here


def by_repeats(x):
    return x.repeat_interleave(MASK.long())  # here


def by_the_result_of_a_factorization(x):
    factor, info = torch.linalg.cholesky_ex(x[:, None] * x)
    return factor if info.any() else x  # here


READS = [
    by_if, by_item, by_tolist, by_numpy, by_formatting, by_dlpack, by_storage, by_comparison,
    by_a_parameters_value, by_a_custom_function, by_nonzero, by_index, by_unique, under_grad,
    by_an_integer_tensor, by_if_of_integers, by_shape_of_integers, by_tolist_of_integers, by_a_mask,
    by_masked_select, by_repeats, by_the_result_of_a_factorization,
]  # fmt: skip


def of_an_argument(x):
    return x.add_(1)  # here


def of_an_item(x):
    x[0] = 0  # here
    return x


def of_a_view(x):
    x.view(-1)[:2].mul_(2)  # here
    return x


def of_a_parameter(x):
    with torch.no_grad():
        WEIGHT.mul_(2)  # here
    return x * WEIGHT


def of_a_view_of_a_buffer(x):
    BUFFER[:1].add_(1)  # here
    return x * BUFFER


def of_statistics(x):
    return NORM(x.expand(4, 3))  # here


def by_out(x):
    return torch.mul(x, 2, out=BUFFER)  # here


def by_a_foreach(x):
    torch._foreach_add_([BUFFER], 1.0)  # here
    return x * BUFFER


CHANGES = [
    of_an_argument, of_an_item, of_a_view, of_a_parameter, of_a_view_of_a_buffer, of_statistics,
    by_out, by_a_foreach,
]  # fmt: skip


def of_a_generator(x):
    return x * torch.rand(3, generator=GENERATOR)  # here


def in_place_of_a_generator(x):
    return torch.empty_like(x).normal_(generator=GENERATOR) + x  # here


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated, and in use

    @torch.jit.script
    def _scripted(x: torch.Tensor) -> torch.Tensor:
        if bool(torch.all(x > 0)):
            return x
        return -x


def by_torchscript(x):
    return _scripted(x)  # here


def calling_backward(x):
    (x * WEIGHT).sum().backward()  # here
    return x


CASES = {
    **dict.fromkeys(READS, "expected a function whose graph is the same for all values"),
    **dict.fromkeys(CHANGES, "expected a function that does not change its arguments, parameters and buffers"),
    **dict.fromkeys([of_a_generator, in_place_of_a_generator], "expected a function without a torch.Generator"),
    by_torchscript: "expected a function that can be traced, got one with TorchScript code",
    calling_backward: "expected a function that returns its gradients",
}  # fmt: skip


@pytest.mark.parametrize(("fn", "words"), CASES.items(), ids=[fn.__name__ for fn in CASES])
@pytest.mark.parametrize("dynamic", [False, True])
def test_it_is_refused_with_its_line(fn, words, dynamic):
    state = [x.detach().clone() for x in (WEIGHT, BUFFER, *NORM.state_dict().values())]
    random, own = torch.get_rng_state(), GENERATOR.get_state()
    fast, x = hog.compile(fn, backend="eager", dynamic=dynamic), draw(3)
    with pytest.raises(NotImplementedError, match=f"^{fn.__name__}: {words}") as caught:
        fast(x)
    source, start = inspect.getsourcelines(ByNumPy if fn is by_a_custom_function else fn)
    line = start + next(i for i, text in enumerate(source) if text.rstrip().endswith("# here"))
    assert f"in {__file__}:{line}" in str(caught.value)
    assert fast.signatures == []
    # nothing is changed, nor drawn
    for before, after in zip(state, (WEIGHT, BUFFER, *NORM.state_dict().values()), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(x, draw(3))
    assert WEIGHT.grad is None
    assert torch.equal(random, torch.get_rng_state())
    assert torch.equal(own, GENERATOR.get_state())


def test_what_is_done_to_tensors_of_its_own_is_not_refused():
    def fn(x):
        y = x.clone()
        y[0] = 0
        y.mul_(2).add_(x)
        z = torch.zeros(3, dtype=x.dtype)
        z[1:] = y[1:]
        return y, z

    fast = hog.compile(fn, backend="eager")
    for seed in range(2):
        torch.testing.assert_close(fast(draw(3, seed=seed)), fn(draw(3, seed=seed)))


def test_numbers_that_are_no_tensors_of_the_call_are_constants():
    def fn(x):
        return (
            x * float(np.sqrt(2)) + torch.from_numpy(np.arange(3.0)) + len(x) + x.shape[0] * x.dim()
        )

    fast = hog.compile(fn, backend="eager")
    for seed in range(2):
        torch.testing.assert_close(fast(draw(3, seed=seed)), fn(draw(3, seed=seed)))


def test_what_a_function_makes_of_a_number_may_be_read():
    def fn(x):
        two = torch.tensor(2.0)
        return x * two.item() * float(two + 1) * two.tolist() * (2 if two > 1 else 1)

    torch.testing.assert_close(hog.compile(fn, backend="eager")(draw(3)), fn(draw(3)))


def test_a_generator_as_an_argument_is_refused():
    fast = hog.compile(lambda x, g: x * torch.rand(3, generator=g), backend="eager")
    with pytest.raises(NotImplementedError, match=r"without a torch\.Generator"):
        fast(draw(3), GENERATOR)


def test_data_parallel_inside_is_refused():
    with alone():
        model = DistributedDataParallel(nn.Linear(3, 1).double())
        fast = hog.compiled_loss(lambda x: model(x).sum(), backend="eager")
        with pytest.raises(NotImplementedError, match="does not call DistributedDataParallel"):
            fast(draw(2, 3))


def test_a_message_names_no_line_where_there_is_none():
    with pytest.raises(NotImplementedError, match=re.escape("(aten.nonzero.default in ")):
        hog.compile(torch.nonzero, backend="eager")(draw(3))
