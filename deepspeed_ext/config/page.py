"""The page docs/config.md, made of the typed tree and the list of refusals."""

from collections.abc import Iterator, Mapping

from deepspeed_ext.config import refusals
from deepspeed_ext.config.block import Block
from deepspeed_ext.config.kinds import AUTO, Effect, FrozenMapping, Key, shown
from deepspeed_ext.config.tree import KNOWN_PARAMS, Root
from deepspeed_ext.config.walk import block_of, key_of

_INTRODUCTION = f"""\
# The config

<!-- Written by `python -m deepspeed_ext.config keys docs/config.md`; do not edit it here. -->

`deepspeed_ext.config.read` reads a config that was written for DeepSpeed: a dict, which is not
changed, the path of a JSON file (of an Hjson file where `hjson` is installed), or a text that is
base64 of JSON.

```python
from deepspeed_ext.config import read

config = read(
    {{
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {{
            "stage": 2,
            "offload_optimizer": {{"device": "cpu"}},
            "overlap_comm": True,
        }},
        "bf16": {{"enabled": True}},
        "gradient_clipping": 1.0,
    }}
)
assert config.zero_optimization.stage == 2 and config.bf16.enabled
assert config.batch_sizes(processes=2) == (32, 4, 4)  # train, micro, steps
assert "overlap_comm changes nothing" in config.warnings[0]
```

`python -m deepspeed_ext.config check FILE` prints what comes of each key of a file, and looks
for the options of optimizer and schedule; its status is 1 where the file is refused. With
`--processes N` it prints the batch sizes, and with `--model FOLDER`, a folder of safetensors files
as transformers writes it, the bytes that training takes on each GPU, in host memory and on disk.

A key has one of four effects:

| effect | what happens |
| --- | --- |
| {Effect.DOES.value} | it does what the tables below say |
| {Effect.SO_ANYWAY.value} | what it asks for is so whatever it says; `config.warnings` names it |
| {Effect.NOWHERE.value} | it acts nowhere, in DeepSpeed neither, or not without a part that is \
not here; `config.warnings` names it |
| refused | an error names it and what to use; a value that asks for nothing is accepted, such as \
`"enabled": false` |

- A key that is in no table is an error, which names the nearest one. A key that stands twice in an
  object and comments in JSON are errors, too. Keys that begin with `_`, or are named `comment`, act
  nowhere.
- `null` is the same as no key. The texts `"true"`, `"8"`, `"1e-5"` and `"inf"` are read as what
  they say.
- `"{AUTO}"` is the default where a key changes nothing, as with the sizes of `zero_optimization`.
  Everywhere else it waits for a value: `read` names all such keys at once, with who fills each.
  Trainer and accelerate fill theirs before they hand the config on.
- `train_batch_size` is `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x
  processes. Two give the third. One of the first two alone means one micro-step;
  `gradient_accumulation_steps` alone is an error.
- Without `gradient_clipping` nothing is clipped. DeepSpeed since 0.19 clips at 1 then.
- Sizes are numbers of elements.
"""


def page() -> str:
    """Return the whole page."""
    lines = [_INTRODUCTION, "## Top level", "", *_table(Root)]
    for block in _blocks(Root):
        lines += ["", f"## {block.place.rstrip('.')}", "", _sentence(block), "", *_table(block)]
        for place, keys in KNOWN_PARAMS.items():
            if place.startswith(block.place) and block.place:
                lines += ["", *_params(place, keys)]
    lines += ["", "## Refused", "", *_refused()]
    return "\n".join(lines) + "\n"


def _blocks(block: type[Block]) -> Iterator[type[Block]]:
    for name in block.model_fields:
        inner = block_of(block, name)
        if inner is not None:
            yield inner
            yield from _blocks(inner)


def _sentence(block: type[Block]) -> str:
    return (block.__doc__ or "").strip()


def _table(block: type[Block]) -> Iterator[str]:
    """Yield the table of a block, what acts first."""
    yield from ("| key | default | effect |", "| --- | --- | --- |")
    rank = list(Effect)
    names = sorted(block.model_fields, key=lambda name: rank.index(key_of(block, name).effect))
    for name in names:
        key, inner = key_of(block, name), block_of(block, name)
        default = block.model_fields[name].get_default()
        has_none = inner or default is None or isinstance(default, FrozenMapping)
        cell = "" if has_none else f"`{_default(default)}`"
        cell = "" if block.model_fields[name].is_required() else cell
        yield f"| {_names(name, key)} | {cell} | {_effect(key, inner)} |"


def _default(value: object) -> str:
    if value == 2**63 - 1:
        return "2^63 - 1"
    if isinstance(value, int) and value >= 10**6:
        return f"{value:.0e}".replace("e+0", "e")
    return shown(value).replace("Infinity", "inf")


def _names(name: str, key: Key) -> str:
    older = ", ".join(f"`{each}`" for each in key.older)
    return f"`{name}`" + (f" (also {older})" if older else "")


def _effect(key: Key, inner: type[Block] | None = None) -> str:
    if inner is not None:
        anchor = inner.place.rstrip(".").replace(".", "")
        return f"a block: [{inner.place.rstrip('.')}](#{anchor})"
    text = key.text if key.effect is Effect.DOES else f"{key.effect.value}: {key.text}"
    filler = "the default" if key.auto_is_default else key.filler
    return text + (f"; `{AUTO}`: {filler}" if filler else "")


def _params(place: str, keys: Mapping[str, Key]) -> Iterator[str]:
    yield f"Arguments in `{place.rstrip('.')}` are passed on. Known are:"
    yield from ("", "| argument | effect |", "| --- | --- |")
    for name, key in keys.items():
        yield f"| `{name}` | {_effect(key)} |"


def _refused() -> Iterator[str]:
    yield from ("| key | accepted is | instead |", "| --- | --- | --- |")
    for row in sorted(refusals.REFUSALS, key=lambda row: row.key):
        yield f"| `{row.key}` | {row.expected} | {row.instead} |"
