"""Images changed within a bound, so that a classifier errs: one step of gradient ascent, and many."""

import torch
from torch import Tensor, nn

import hoglib as hog
from hoglib._core import validation

BOUNDS = (-1.0, 1.0)  # of a pixel of `experiments.data.digits`


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """max_(c != y) z_c - z_y [n] of logits [n, C]: an image is told wrong where it is above 0.

    A tie is no right answer, and NaN is +inf.
    """
    own = logits.gather(1, label[:, None])
    others = logits.scatter(1, label[:, None], -torch.inf).amax(1)
    return (others - own[:, 0]).nan_to_num(nan=torch.inf)


def fgsm(
    network: nn.Module,
    x: Tensor,
    label: Tensor,
    epsilon: float,
    bounds: tuple[float, float] = BOUNDS,
) -> Tensor:
    """The fast gradient sign method: x + epsilon sign(dL/dx), clipped to the bounds.

    Shapes: x [n, ...], label [n]; L is the cross-entropy of network(x) [n, C]. No gradient is left
    anywhere. Raises ValueError for an epsilon below 0 or not finite.
    Source: Goodfellow, Shlens and Szegedy, Explaining and Harnessing Adversarial Examples, 2015,
    section 4.
    """
    validation.number("epsilon", epsilon, minimum=0)
    return (x + epsilon * gradient(network, x, label).sign()).clamp(*bounds)


def pgd(
    network: nn.Module,
    x: Tensor,
    label: Tensor,
    epsilon: float,
    steps: int = 20,
    restarts: int = 5,
    bounds: tuple[float, float] = BOUNDS,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Projected gradient ascent from several starts: of all images passed, the one told worst.

        x_(k+1) = P(x_k + a sign(dL/dx)),  P onto |x_k - x| <= epsilon and the bounds,
        a = 2.5 epsilon / steps

    The first start is the image of `fgsm`, the others are drawn by generator from all of the ball.
    The images returned have the largest `margin` among x itself and all x_k, so that it succeeds
    wherever `fgsm` does, and a mistake on the way is kept.

    Shapes: x [n, ...], label [n]; L is the cross-entropy of network(x) [n, C]. No gradient is left
    anywhere. Raises TypeError and ValueError for arguments of the wrong kind.
    Source: Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, 2018,
    section 2.1, and section 5 for the step.
    """
    validation.number("epsilon", epsilon, minimum=0)
    validation.at_least("steps", steps, 1)
    validation.at_least("restarts", restarts, 1)
    low, high = (x - epsilon).clamp(*bounds), (x + epsilon).clamp(*bounds)
    logits, at_x = _slope(network, x, label)
    worst, most = x.clone(), margin(logits, label)
    for start in range(restarts):
        if start:
            noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
            found = x + epsilon * (2 * noise - 1)
        else:
            found = x + epsilon * at_x.sign()
        for _ in range(steps + 1):
            found = torch.maximum(torch.minimum(found, high), low)
            logits, slope = _slope(network, found, label)
            reached = margin(logits, label)
            better = reached > most
            worst[better], most = found[better], torch.maximum(most, reached)
            found = found + 2.5 * epsilon / steps * slope.sign()
    return worst


@torch.no_grad()
def told_right(network: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """Which images [n] have the largest logit at their label, without a tie."""
    return margin(network(x), label) < 0


def gradient(network: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """dL/dx of the cross-entropy of each image, also where the caller records no gradients."""
    return _slope(network, x, label)[1]


def _slope(network: nn.Module, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and dL/dx."""
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        logits = network(x)
        loss = hog.ops.softmax_cross_entropy(logits, label.clone(), reduction="sum")
        return logits.detach(), torch.autograd.grad(loss, x)[0]
