"""The load of experts: how much of all choices each expert of each layer was, step by step."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

Load = list[list[int]]  # of one step: for each layer, how many choices each expert was
_COLUMNS = 150  # of the picture, each the mean of some steps


def shares(loads: list[Load]) -> Tensor:
    """Return (steps, layers, experts), of each layer's choices those of each expert, float64."""
    counts = torch.tensor(loads, dtype=torch.float64)
    return counts / counts.sum(-1, keepdim=True)


def load_figure(loads: list[Load], title: str) -> Figure:
    """Draw a row for each expert of each layer, over the steps; white is an even share.

    Args:
        loads: of the steps, from the first one on; at least one.
        title: of the picture.
    """
    found = shares(loads)
    steps, layers, experts = found.shape
    parts = found.tensor_split(min(steps, _COLUMNS))
    relative = experts * torch.stack([part.mean(0) for part in parts], -1)
    figure = Figure(figsize=(8, min(1.9 + 1.1 * layers, 40)), layout="constrained")
    rows = figure.subplots(layers, sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(rows):
        image = axes.imshow(
            relative[layer].numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(0.5, steps + 0.5, experts - 0.5, -0.5),
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
        axes.yaxis.get_major_locator().set_params(integer=True)
    rows[0].set_title(title)
    rows[-1].set_xlabel("step")
    figure.colorbar(
        image, ax=list(rows), label="share of choices\n(1: as all others)", extend="max"
    )
    return figure


def extremes(loads: list[Load]) -> str:
    """Return a line that names the least and the most loaded expert, of all steps' choices."""
    totals = torch.tensor(loads, dtype=torch.float64).sum(0)
    share = totals / totals.sum(-1, keepdim=True)
    experts = share.shape[-1]

    def named(place: Tensor) -> str:
        layer, expert = divmod(int(place), experts)
        return f"expert {expert} of layer {layer} {share[layer, expert]:.1%}"

    return (
        f"load: of its layer's choices, {named(share.argmin())} (least) and"
        f" {named(share.argmax())} (most); even is {1 / experts:.1%}"
    )
