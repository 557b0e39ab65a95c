"""Adversarial attacks within a bound: one step of gradient ascent (FGSM), and many (PGD)."""

import torch
from torch import Tensor, nn

import hoglib as hog
from experiments.checks import at_least, not_negative

BOUNDS = (-1.0, 1.0)  # of a pixel of `experiments.shared.digits`


def fgsm(
    network: nn.Module,
    x: Tensor,
    label: Tensor,
    epsilon: float,
    bounds: tuple[float, float] = BOUNDS,
) -> Tensor:
    """The fast gradient sign method.

        x + epsilon sign(dL/dx), clipped to the bounds

    L is the cross-entropy of the logits. The gradients of the network's parameters are left alone.

    Args:
        network: Function of images [n, ...] that returns logits [n, C].
        x: Images [n, ...].
        label: Labels [n].
        epsilon: Largest change of a pixel.
        bounds: Least and largest value of a pixel.
    Returns:
        The attacked images [n, ...].
    Raises:
        ArgumentValueError: for an epsilon that is negative or not finite.
    References:
        Goodfellow, Shlens and Szegedy, Explaining and Harnessing Adversarial Examples, 2015, section 4.
    """
    not_negative("epsilon", epsilon)
    return (x + epsilon * input_gradient(network, x, label).sign()).clamp(*bounds)


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
    """Projected gradient ascent from several starts, keeping the worst image of all.

        x_(k+1) = P(x_k + a sign(dL/dx)),  P onto |x_k - x| <= epsilon and the bounds,
        a = 2.5 epsilon / steps

    The first start is the image of `fgsm`, the others are drawn uniformly from the ball. Each image
    returned is the one of largest `margin` among x itself and all x_k, so that the attack succeeds
    wherever `fgsm` does, and a mistake at any step counts.

    Args:
        network: Function of images [n, ...] that returns logits [n, C].
        x: Images [n, ...].
        label: Labels [n].
        epsilon: Largest change of a pixel.
        steps: Steps from each start.
        restarts: Number of starts.
        bounds: Least and largest value of a pixel.
        generator: Generator of the random starts. Default: torch's own.
    Returns:
        The attacked images [n, ...].
    Raises:
        ArgumentValueError: for an epsilon that is negative or not finite, and for no step or start.
    References:
        Madry et al., Towards Deep Learning Models Resistant to Adversarial Attacks, 2018, section 2.1,
        and section 5 for the step size.
    """
    not_negative("epsilon", epsilon)
    at_least("steps", steps, 1)
    at_least("restarts", restarts, 1)
    low, high = (x - epsilon).clamp(*bounds), (x + epsilon).clamp(*bounds)
    logits, gradient_at_x = _logits_and_gradient(network, x, label)
    worst, largest = x.clone(), margin(logits, label)
    for start in range(restarts):
        if start:
            noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x)
            attacked = x + epsilon * (2 * noise - 1)
        else:
            attacked = x + epsilon * gradient_at_x.sign()
        for _ in range(steps + 1):
            attacked = torch.maximum(torch.minimum(attacked, high), low)
            logits, gradient = _logits_and_gradient(network, attacked, label)
            margins = margin(logits, label)
            worse = margins > largest
            worst[worse], largest = attacked[worse], torch.maximum(largest, margins)
            attacked = attacked + 2.5 * epsilon / steps * gradient.sign()
    return worst


def margin(logits: Tensor, label: Tensor) -> Tensor:
    """max_(c != y) z_c - z_y [n] of logits z [n, C]: above 0 an image is classified wrongly.

    A tie is not correct either, and NaN counts as +inf.
    """
    own = logits.gather(1, label[:, None])
    others = logits.scatter(1, label[:, None], -torch.inf).amax(1)
    return (others - own[:, 0]).nan_to_num(nan=torch.inf)


@torch.no_grad()
def is_correct(network: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """Which images [n] have the largest logit at their label, without a tie."""
    return margin(network(x), label) < 0


def input_gradient(network: nn.Module, x: Tensor, label: Tensor) -> Tensor:
    """dL/dx of the cross-entropy of each image, also where the caller disabled gradients."""
    return _logits_and_gradient(network, x, label)[1]


def _logits_and_gradient(network: nn.Module, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False), torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        logits = network(x)
        loss = hog.ops.softmax_cross_entropy(logits, label.clone(), reduction="sum")
        return logits.detach(), torch.autograd.grad(loss, x)[0]
