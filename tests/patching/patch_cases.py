"""Small models of transformers' families, and what their numbers are, that tests share."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 61
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_OLDER = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
_EXPERTS = dict(moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2)
_GPT2 = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0)
MODELS: dict[str, dict[str, Any]] = {  # by the prefix of transformers' classes
    "Llama": _COMMON | dict(attention_bias=True),
    "Mistral": _COMMON | dict(sliding_window=5),
    "Qwen2": _COMMON,
    "Qwen3": _COMMON | dict(head_dim=8),
    "Qwen3Moe": _COMMON | _EXPERTS | dict(head_dim=8, output_router_logits=True),
    "Mixtral": _COMMON | dict(num_local_experts=4, output_router_logits=True),
    "Gemma2": _COMMON | dict(head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=1.5),
    "Gemma3": _COMMON | dict(head_dim=8),
    "Phi3": _COMMON | dict(partial_rotary_factor=0.5),
    "GPT2": _OLDER | _GPT2 | dict(vocab_size=VOCABULARY, attn_pdrop=0),
    "GPTNeoX": _COMMON | dict(rotary_pct=0.5),
    "OPT": _COMMON | dict(ffn_dim=40, word_embed_proj_dim=32, dropout=0.0),
    "Bloom": _OLDER | dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_CLASSES = {"GPT2": "GPT2LMHeadModel"}


def model_of(family: str, **options: Any) -> Any:
    """Return a random model in training, with weights that are large enough to matter."""
    config = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))(
        **(MODELS[family] | options)
    )
    torch.manual_seed(0)
    model = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def batch(rows: int = 2, length: int = 9) -> dict[str, Tensor]:
    """Return tokens, of which the last ones are padding, and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


class _Exact(nn.Module):
    """A rotary embedding in float64; transformers' works in float32 whatever its dtype.

    Args:
        own: transformers', of a model in float32.
    """

    def __init__(self, own: Any) -> None:
        super().__init__()
        names = [name for name, _ in own.named_buffers() if "original" not in name]
        self.kept = {name: getattr(own, name).double() for name in names}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        angles = position_ids[..., None].double() * self.kept[name]
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def exact(model: Any) -> Any:
    """Return an unpatched copy in float64, with experts in transformers' own loop."""
    made = copy.deepcopy(model)
    rotary = {name: each for name, each in made.named_modules() if name.endswith("rotary_emb")}
    made = made.double()
    for name in rotary:
        parent, _, last = name.rpartition(".")
        own = model.get_submodule(name)
        setattr(made.get_submodule(parent), last, _Exact(own))
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    return made


def numbers_of(model: Any, **inputs: Any) -> dict[str, Tensor]:
    """Return the loss and all gradients of a training step, and the logits without labels."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    rest = {name: value for name, value in inputs.items() if name != "labels"}
    with torch.no_grad():
        found["logits"] = model(**rest).logits
    return found | {"loss": loss.detach()}


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each of the numbers is off at most."""
    assert found.keys() == right.keys()
    return {name: float((found[name].double() - right[name]).abs().max()) for name in right}
