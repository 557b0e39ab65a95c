"""Pictures of digits in rows."""

from math import isqrt
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from experiments.shared.noisy_digits import Examples
from experiments.shared.style import hide_frame
from hoglib.plotting import BLUE, VERMILLION


def labelled_digits(
    figure: Any, title: str, examples: Examples, picks: Tensor, rows: int = 2
) -> None:
    """Square images in rows, each with the given label and, if that is wrong, the true one."""
    figure.suptitle(title)
    axes = figure.subplots(rows, -(-len(picks) // rows) or 1, squeeze=False).flatten()
    for axis in axes:
        axis.set_axis_off()
    for axis, pick in zip(axes, picks.tolist(), strict=False):
        draw_digit(axis, examples.x[pick], *label_of(examples, pick))


def label_of(examples: Examples, number: int) -> tuple[str, str]:
    """The given label, with the true one if it is wrong, and a colour."""
    given, truth = int(examples.label[number]), int(examples.truth[number])
    return (f"{given}", BLUE) if given == truth else (f"{given}, is {truth}", VERMILLION)


def draw_digit(axis: Any, image: Tensor, text: str, colour: str) -> None:
    """A square image under a title."""
    side = isqrt(image.numel())
    axis.set_axis_off()
    axis.imshow(image.reshape(side, side).numpy(), cmap="gray_r")
    axis.set_title(text, fontsize=9, color=colour)


def tiles(figure: Any, images: dict[str, Tensor], gradients: dict[str, Tensor]) -> Any:
    """A row [n, 64] for each name: images from -1 to 1, then gradients, each scaled to its largest."""
    scaled = {name: some / some.abs().amax(1, keepdim=True) for name, some in gradients.items()}
    lines = []
    for colours, rows in (("gray_r", images), ("RdBu_r", scaled)):
        for some in rows.values():
            tones = torch.from_numpy(mpl.colormaps[colours](((some + 1) / 2).cpu().numpy()))
            pixels = tones.reshape(-1, 8, 8, 4).permute(0, 3, 1, 2)
            spaced = torch.nn.functional.pad(pixels, (1, 1, 4, 0), value=1.0)
            lines.append(torch.cat([*spaced], 2))
    axis = figure.subplots()
    axis.imshow(torch.cat(lines, 1).permute(1, 2, 0).numpy())
    names = [name.replace(", ", "\n") for name in (*images, *gradients)]
    axis.set_yticks([12 * i + 7.5 for i in range(len(names))], names)
    axis.set_anchor("N")
    axis.set_xticks([])
    hide_frame(axis)
    return axis


def above_tile(row: int, column: int) -> tuple[float, float]:
    """The position above a tile of `tiles`."""
    return 10 * column + 4.5, 12 * row + 3.5
