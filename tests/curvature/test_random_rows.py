"""Random vectors of processes that share the parameters: the numbers of one draw, a part at a time."""

import pytest
import torch

from hoglib.curvature import vector_space


@pytest.mark.parametrize("total", [3, 16, 40, 97, 100, 112, 113])
@pytest.mark.parametrize("kind", ["normal", "signs"])
def test_parts_are_those_of_one_draw(kind, total, monkeypatch):
    monkeypatch.setattr(vector_space, "DRAWN_AT_ONCE", 32)
    one, several = (torch.Generator().manual_seed(0) for _ in range(2))

    def draw(generator, count):
        if kind == "signs":
            return torch.randint(2, (count,), generator=generator)
        return torch.randn(count, generator=generator, dtype=torch.float64)

    numbers = vector_space._RandomNumbers(lambda n: draw(several, n), total, torch.device("cpu"))
    sizes = [1, 2, *([5] * ((total - 3) // 5)), (total - 3) % 5]
    parts = torch.cat([numbers.take(size) for size in sizes])
    assert torch.equal(parts, draw(one, total))
    assert torch.equal(draw(one, 7), draw(several, 7))  # both generators are in one state
