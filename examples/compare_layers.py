"""Train a small BERT with plain layers and with ours, and compare the losses.

    python -m examples.compare_layers --out out/layers

trains with torch's layers from four seeds, and from the weights of the first seed with
DeepSpeedTransformerLayer, with attention to the blocks of BigBird, and with random-LTD, whose
layers see more tokens step by step. It prints a table and draws the curves in layers.png.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm  # type: ignore[import-untyped]

from deepspeed_ext.op_builder import BuildError, program
from deepspeed_ext.ops import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer
from deepspeed_ext.ops.sparse_attention import BigBirdSparsityConfig, SparseSelfAttention
from deepspeed_ext.random_ltd import RandomLTDScheduler, convert_to_random_ltd
from examples.text import Text, batch, standard_library

HIDDEN, HEADS, LAYERS, CONTEXT, SAMPLES = 128, 4, 4, 128, 8
BLOCK = 16  # tokens, of BigBird
RATE, DROPPED, HIDDEN_BYTES = 1e-3, 0.1, 0.15  # of learning; by dropout; of a sample
MASK = 256  # stands for a byte that is hidden
SEEDS = 4
_POINTS = 25  # of each curve

LTD = "random-LTD"

Curve = list[tuple[int, float]]


class Layer(nn.Module):
    """A layer with norms before its parts, by torch.

    Attributes:
        attend: what q, k and v go through; None: attention of all tokens, with dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.next_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.attend: SparseSelfAttention | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer makes of (samples, tokens, HIDDEN)."""
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind()
        p = DROPPED if self.training else 0.0
        if self.attend is None:
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        else:
            found = self.attend(q, k, v)
        x = x + F.dropout(self.out(found.transpose(1, 2).flatten(2)), p)
        wide = F.gelu(self.up(self.next_norm(x)), approximate="tanh")
        return x + F.dropout(self.down(wide), p)


class Bert(nn.Module):
    """Bytes, of which some are hidden, to what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(MASK + 1, HIDDEN)
        self.places = nn.Embedding(CONTEXT, HIDDEN)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, MASK)

    def forward(self, given: Tensor, hidden: Tensor) -> Tensor:
        """Return the loss of the bytes that are hidden, in nats.

        Args:
            given: (SAMPLES, CONTEXT), int64.
            hidden: of the same shape, bool.
        """
        x = self.bytes(given.masked_fill(hidden, MASK)) + self.places.weight
        logits = self.head(self.norm(self.layers(x))[hidden])
        return F.cross_entropy(logits, given[hidden])


Kind = Callable[[Any], nn.Module]  # what is made of each layer


def plain(layer: Layer) -> nn.Module:
    """Return the layer."""
    return layer


def whole(layer: Layer) -> nn.Module:
    """Return a layer of ours with the same weights."""
    config = DeepSpeedTransformerConfig(
        hidden_size=HIDDEN,
        heads=HEADS,
        attn_dropout_ratio=DROPPED,
        hidden_dropout_ratio=DROPPED,
        layer_norm_eps=layer.norm.eps,
    )
    q, k, v = layer.qkv.weight.chunk(3)
    q_bias, k_bias, v_bias = layer.qkv.bias.chunk(3)
    others = (layer.out, layer.next_norm, layer.up, layer.down, layer.norm)
    return DeepSpeedTransformerLayer(
        config,
        [q, k, v, *(part.weight for part in others)],
        [q_bias, k_bias, v_bias, *(part.bias for part in others)],
    )


def sparse(layer: Layer) -> nn.Module:
    """Return the layer, whose tokens see the blocks of BigBird from now on."""
    layer.attend = SparseSelfAttention(BigBirdSparsityConfig(HEADS, BLOCK), max_seq_length=CONTEXT)
    return layer


def dropping(model: Bert, steps: int) -> RandomLTDScheduler:
    """Let all layers but the first and the last drop tokens until half of the steps are done."""
    config = {
        "total_layer_num": LAYERS,
        "random_ltd_layer_num": LAYERS - 2,
        "global_batch_size": SAMPLES,
        "model_mask_name": None,
        "random_ltd_schedule": {
            "schedule_type": "fixed_linear",
            "min_value": CONTEXT // 2,
            "max_value": CONTEXT,
            "schedule_config": {"require_steps": max(1, steps // 2), "seq_per_step": BLOCK},
        },
    }
    scheduler = RandomLTDScheduler(config)
    convert_to_random_ltd(model, Layer)
    for number, layer in enumerate([*model.layers][1:-1]):
        layer.init_config(config, scheduler, number)
    return scheduler


def hidden_at(seed: int) -> Tensor:
    """Return which bytes of a batch are hidden; the same seed hides the same ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SAMPLES, CONTEXT, generator=generator) < HIDDEN_BYTES


@torch.no_grad()
def validate(model: Bert, text: Text) -> float:
    """Return the loss on text that was not trained on, the same each time."""
    model.eval()
    losses = [
        model(batch(text.validation, SAMPLES, CONTEXT, seed)[0], hidden_at(seed))
        for seed in range(8)
    ]
    model.train()
    return float(torch.stack(losses).mean())


def train(name: str, kind: Kind, steps: int, seed: int, text: Text) -> Curve:
    """Return the validation loss over the steps."""
    torch.manual_seed(seed)
    model = Bert()
    model.layers = nn.Sequential(*map(kind, model.layers))
    scheduler = dropping(model, steps) if name == LTD else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    curve = []
    for number in tqdm(range(1, steps + 1), desc=f"{name:>12}", unit="step"):
        if scheduler is not None:
            scheduler.update_seq(number)
        optimizer.zero_grad()
        place = seed * steps + number  # other text for another seed
        model(batch(text.training, SAMPLES, CONTEXT, place)[0], hidden_at(place)).backward()
        optimizer.step()
        if number % max(1, steps // _POINTS) == 0 or number == steps:
            curve.append((number, validate(model, text)))
    return curve


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw the losses of all in one picture, those of plain layers in grey."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        is_plain = name.startswith("plain")
        axes.plot(*zip(*curve, strict=True), label=name, color="0.7" if is_plain else None)
    axes.set(title="Layers of a small BERT", xlabel="step", ylabel="loss of hidden bytes (nats)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


@program
def main(arguments: list[str] | None = None) -> int:
    """Do what the command line asks for and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.compare_layers", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/layers"), metavar="DIR")
    parser.add_argument("--steps", type=int, default=300, metavar="N")
    options = parser.parse_args(arguments)
    runs: list[tuple[str, Kind, int]] = [
        *((f"plain, seed {seed}", plain, seed) for seed in range(SEEDS)),
        ("whole layer", whole, 0),
        ("BigBird", sparse, 0),
        (LTD, plain, 0),
    ]
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        text = standard_library(CONTEXT)
        curves = {name: train(name, kind, options.steps, seed, text) for name, kind, seed in runs}
        draw(curves, options.out / "layers.png")
    except BrokenPipeError:
        raise
    except (BuildError, OSError) as error:
        print(f"compare_layers: {error}", file=sys.stderr)
        return 1
    print(f"\n{'layers':>14}{'loss':>10}")
    for name, curve in curves.items():
        print(f"{name:>14}{curve[-1][1]:>10.4f}")
    print(f"wrote {options.out / 'layers.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
