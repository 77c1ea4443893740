"""A whole layer of a transformer, as DeepSpeed has it: BERT's, with norms before or behind."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepspeed_ext.ops._dropout import draw_seeds
from deepspeed_ext.ops._kinds import check_kinds
from deepspeed_ext.ops.transformer.attention import check_hidden_states, dropout_attention
from deepspeed_ext.ops.transformer.config import DeepSpeedTransformerConfig, check_config
from deepspeed_ext.ops.transformer.nodes import Options, ahead_of_attention, behind_attention
from deepspeed_ext.torch_internals.dispatch import is_in_backward

_NAME = "DeepSpeedTransformerLayer"
_OTHERS = (  # that layers take elsewhere
    *("head_mask", "layer_head_mask", "encoder_hidden_states", "encoder_attention_mask"),
    *("past_key_value", "output_attentions", "grads"),
)
Seeds = tuple[Tensor | None, Tensor | None, Tensor | None]


class DeepSpeedTransformerLayer(nn.Module):
    """Attention and a feed-forward part with gelu_tanh, for training.

    Sums, dropout, norms and activation are ops of ours, products and attention torch's. Dtype and
    device are those of the parameters; any batch and any length of sequences is taken. Nothing is
    shared between layers.

    With `pre_layer_norm`, norm_w and norm_b come before the attention, attn_nw and attn_nb before
    the feed-forward part. Without, attn_nw and attn_nb follow the first sum, norm_w and norm_b the
    second.

    A call draws one seed for each place of dropout, by one call of a generator, and keeps these in
    place of masks. The masks of outputs are the same on the CPU and on CUDA for the same seed;
    attention on CUDA drops by torch's own generator.

    Args:
        config: what the layer is made by. Its flags and rates are read at each call.
        initial_weights: None, or 8 tensors: of q, k, v and the attention's output, its norm, the
            feed-forward part's two, its norm. They are copied.
        initial_biases: None, or the same of biases.

    Attributes:
        attn_qkvw: (3 hidden, hidden), of q, k and v in this order; attn_qkvb.
        attn_ow: (hidden, hidden); attn_ob.
        attn_nw: (hidden,); attn_nb.
        inter_w: (intermediate, hidden); inter_b.
        output_w: (hidden, intermediate); output_b.
        norm_w: (hidden,); norm_b.

    Raises:
        ValueError: a value of the config that is needed is missing or out of its range, or there
            are not 8 weights or biases.
    """

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        check_kinds(_NAME, config=(config, DeepSpeedTransformerConfig))
        check_config(config)
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        self.attn_qkvw = nn.Parameter(torch.empty(3 * hidden, hidden))
        self.attn_qkvb = nn.Parameter(torch.empty(3 * hidden))
        self.attn_ow = nn.Parameter(torch.empty(hidden, hidden))
        self.attn_ob = nn.Parameter(torch.empty(hidden))
        self.attn_nw = nn.Parameter(torch.empty(hidden))
        self.attn_nb = nn.Parameter(torch.empty(hidden))
        self.inter_w = nn.Parameter(torch.empty(inner, hidden))
        self.inter_b = nn.Parameter(torch.empty(inner))
        self.output_w = nn.Parameter(torch.empty(hidden, inner))
        self.output_b = nn.Parameter(torch.empty(hidden))
        self.norm_w = nn.Parameter(torch.empty(hidden))
        self.norm_b = nn.Parameter(torch.empty(hidden))
        self._generators: dict[torch.device, torch.Generator] = {}
        if initial_weights is None:
            self.init_transformer_weights(config.adjust_init_range)
        else:
            self._copy("initial_weights", initial_weights, "w")
        if initial_biases is not None:
            self._copy("initial_biases", initial_biases, "b")
        elif initial_weights is not None:
            self._clear_biases()
        self.train(bool(config.training))

    @torch.no_grad()
    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Draw new weights, and set biases to 0.

        Args:
            adjust_init_range: whether weights before sums are smaller.

        Raises:
            ValueError: the config has no initializer_range, or no num_hidden_layers to adjust by.
        """
        deviation = self.config.initializer_range
        needed = {"initializer_range": deviation}
        if adjust_init_range:
            needed["num_hidden_layers"] = self.config.num_hidden_layers
        for name, value in needed.items():
            if not 0 < value < math.inf:
                want = "more than 0" if not value > 0 else "a finite number"
                raise ValueError(
                    f"DeepSpeedTransformerConfig: {name} is {value!r}, expected {want}"
                )
        before_sums = deviation
        if adjust_init_range:
            before_sums /= math.sqrt(2 * self.config.num_hidden_layers)
        self.attn_qkvw.normal_(0, deviation)
        self.attn_ow.normal_(0, before_sums)
        self.inter_w.normal_(0, deviation)
        self.output_w.normal_(0, before_sums)
        self.attn_nw.fill_(1)
        self.norm_w.fill_(1)
        self._clear_biases()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        layer_head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: object = None,
        output_attentions: bool = False,
        grads: object = None,
    ) -> Tensor | tuple[Tensor]:
        """Return what the layer makes of hidden states.

        Args:
            hidden_states: (batch, length, hidden), of the parameters' dtype, unless under autocast.
            attention_mask: None, or what can be broadcast to (batch, heads, length, length), such
                as (batch, 1, 1, length): added to the scores, or bool, True where a key is seen.
            head_mask: None, as all that follows, which other layers have.
            layer_head_mask: likewise.
            encoder_hidden_states: likewise.
            encoder_attention_mask: likewise.
            past_key_value: likewise.
            output_attentions: False.
            grads: None; gradients are in the parameters' grad.

        Returns:
            The shape of hidden_states; with return_tuple in a tuple.

        Raises:
            ValueError: what is to be None is not; or hidden_states has another shape.
            RuntimeError: a layer with a generator of its own is called again within a backward.
        """
        others = (
            *(head_mask, layer_head_mask, encoder_hidden_states, encoder_attention_mask),
            *(past_key_value, output_attentions or None, grads),
        )
        for name, value in zip(_OTHERS, others, strict=True):
            if value is not None:
                raise ValueError(
                    f"{_NAME}: {name} is given, expected none, as the layer does nothing with it"
                )
        check_kinds(_NAME, hidden_states=(hidden_states, Tensor))
        check_hidden_states(_NAME, hidden_states, self.attn_qkvw.shape[-1])
        config = self.config
        of_attention, of_sum, of_out = self._seeds(hidden_states.device)
        options = Options(
            heads=int(config.heads),
            p=0.0 if of_out is None else float(config.hidden_dropout_ratio),
            eps=float(config.layer_norm_eps),
            is_invertible=config.normalize_invertible and torch.is_grad_enabled(),
            activates_again=config.gelu_checkpoint,
        )
        norm, none = (self.norm_w, self.norm_b), (None, None)
        first, last = (norm, none) if config.pre_layer_norm else (none, norm)
        q, k, v, residual = ahead_of_attention(
            options, hidden_states, first, self.attn_qkvw, self.attn_qkvb
        )
        p = float(config.attn_dropout_ratio) if self.training else 0.0
        attended = dropout_attention(q, k, v, attention_mask, p=p, seed=of_attention)
        weights = (
            *(self.attn_ow, self.attn_ob, self.attn_nw, self.attn_nb),
            *(self.inter_w, self.inter_b, self.output_w, self.output_b),
        )
        out = behind_attention(options, attended, residual, (of_sum, of_out), weights, last)
        return (out,) if config.return_tuple else out

    def _seeds(self, device: torch.device) -> Seeds:
        """Return those of probabilities, attention and layer; None where nothing is dropped."""
        config = self.config
        if not self.training or max(config.attn_dropout_ratio, config.hidden_dropout_ratio) == 0:
            return None, None, None
        of_attention, of_sum, of_out = draw_seeds(device, 3, self._generator(device))
        return of_attention, of_sum, of_out

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if self.config.seed < 0:
            return None
        if is_in_backward():
            raise RuntimeError(
                f"{_NAME}: config.seed is {self.config.seed}, expected -1 under"
                " activation checkpointing, which brings back torch's generator alone"
            )
        if device not in self._generators:
            generator = torch.Generator(device)
            generator.manual_seed(int(self.config.seed))
            self._generators[device] = generator
        return self._generators[device]

    @torch.no_grad()
    def _copy(self, argument: str, tensors: Sequence[Tensor], end: str) -> None:
        """Copy 8 weights or biases, of which the first three become one."""
        if len(tensors) != 8:
            raise ValueError(f"{_NAME}: {argument} has {len(tensors)} tensors, expected 8")
        for i, tensor in enumerate(tensors):
            check_kinds(_NAME, **{f"{argument}[{i}]": (tensor, Tensor)})
        third = self.attn_qkvw if end == "w" else self.attn_qkvb
        shape = [third.shape[0] // 3, *third.shape[1:]]
        for i, tensor in enumerate(tensors[:3]):
            if list(tensor.shape) != shape:
                raise ValueError(
                    f"{_NAME}: {argument}[{i}] has shape {list(tensor.shape)}, expected {shape}"
                )
        values = [torch.cat([tensor.detach() for tensor in tensors[:3]]), *tensors[3:]]
        names = ("attn_qkv", "attn_o", "attn_n", "inter_", "output_", "norm_")
        for name, value in zip(names, values, strict=True):
            parameter = getattr(self, f"{name}{end}")
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{_NAME}: {argument} has shape {list(value.shape)} for"
                    f" {name}{end}, expected {list(parameter.shape)}"
                )
            parameter.copy_(value)

    @torch.no_grad()
    def _clear_biases(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("b"):
                parameter.zero_()
