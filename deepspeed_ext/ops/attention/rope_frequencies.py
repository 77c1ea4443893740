"""The frequencies of rotary position embedding, by the rules that models name, in float64."""

import math

import torch
from torch import Tensor


def rope_frequencies(width: int, *, base: float = 10000.0, factor: float = 1.0) -> Tensor:
    """Return base^(-2 j / width) / factor for each pair j of elements that turn.

    Args:
        width: how many elements of a head turn, an even number.
        base: of the geometric sequence; ``rope_theta`` of many configurations.
        factor: by how much longer contexts are than those in training, of the rule "linear".

    Returns:
        (width / 2,), float64, on the CPU, radians per position.

    See: Su et al., "RoFormer", 2021, section 3.2.2; Chen et al., "Extending Context Window of Large
    Language Models via Positional Interpolation", 2023.
    """
    _check("width", width, width > 0 and width % 2 == 0, "an even number above 0")
    _check("base", base, 0 < base < math.inf, "a number above 0")
    _check("factor", factor, 0 < factor < math.inf, "a number above 0")
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    return base**-exponents / factor


def rope_frequencies_ntk(
    width: int, *, length: int, max_position_embeddings: int, factor: float, base: float = 10000.0
) -> Tensor:
    """Return the frequencies of the rule "dynamic" for a context of this length.

    Args:
        width: as in ``rope_frequencies``.
        length: of the context; up to that of training, frequencies are those of training.
        max_position_embeddings: the length of contexts in training.
        factor: as the configuration has it.
        base: as in ``rope_frequencies``, in training.

    Returns:
        As ``rope_frequencies``.

    See: bloc97, "NTK-Aware Scaled RoPE", 2023; emozilla, "Dynamically Scaled RoPE", 2023.
    """
    _check("width", width, width > 2 and width % 2 == 0, "an even number above 2")
    _check("length", length, length > 0, "a number above 0")
    _check_trained(max_position_embeddings)
    _check("factor", factor, 1 <= factor < math.inf, "a number that is 1 or more")
    stretch = max(1.0, factor * length / max_position_embeddings - (factor - 1))
    return rope_frequencies(width, base=base * stretch ** (width / (width - 2)))


def rope_frequencies_yarn(
    width: int,
    *,
    factor: float,
    original_max_position_embeddings: int,
    base: float = 10000.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Tensor:
    """Return the frequencies of the rule "yarn"; ``rope_scale_yarn`` is the scale beside them.

    Args:
        width: as in ``rope_frequencies``.
        factor: by how much longer contexts are than those in training.
        original_max_position_embeddings: the length of contexts in training.
        base: as in ``rope_frequencies``.
        beta_fast: pairs that turn so often in such a context, or more often, stay as they are.
        beta_slow: those that turn so often, or less, are divided by the factor.
        truncate: whether the pairs where these begin and end are whole numbers.

    Returns:
        As ``rope_frequencies``.

    See: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023,
    section 3.2.
    """
    plain = rope_frequencies(width, base=base)
    _check_trained(original_max_position_embeddings)
    _check("factor", factor, 1 <= factor < math.inf, "a number that is 1 or more")
    _check("beta_slow", beta_slow, 0 < beta_slow < beta_fast, f"between 0 and {beta_fast}")
    _check("base", base, base > 1, "a number above 1")

    def pair_that_turns(times: float) -> float:
        """Return which pair turns so often in a context of training."""
        turns = original_max_position_embeddings / (times * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(base))

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001  # a step
    pairs = torch.arange(width // 2, dtype=torch.float64, device="cpu")
    slow = ((pairs - first) / (last - first)).clamp(0, 1)
    return plain * (1 - slow) + plain / factor * slow


def rope_scale_yarn(factor: float, *, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
    """Return the ``scale`` of rope that belongs to the rule "yarn".

    Args:
        factor: as there.
        mscale: as the configuration has it.
        mscale_all_dim: likewise; 0 for none.

    Returns:
        0.1 ln(factor) mscale + 1, or its quotient with that of mscale_all_dim.

    See: Peng et al., "YaRN", 2023, equation 22.
    """
    _check("factor", factor, 1 <= factor < math.inf, "a number that is 1 or more")

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1

    return scale(mscale) / scale(mscale_all_dim)


def rope_frequencies_llama3(
    width: int,
    *,
    factor: float = 8.0,
    original_max_position_embeddings: int = 8192,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    base: float = 500000.0,
) -> Tensor:
    """Return the frequencies of the rule "llama3".

    Args:
        width: as in ``rope_frequencies``.
        factor: what the low frequencies are divided by.
        original_max_position_embeddings: the length of contexts in training.
        low_freq_factor: pairs that turn less often in such a context are low ones.
        high_freq_factor: those that turn more often stay as they are.
        base: as in ``rope_frequencies``.

    Returns:
        As ``rope_frequencies``.

    See: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.4; the rule itself is in
    the code that was published with version 3.1.
    """
    plain = rope_frequencies(width, base=base)
    _check_trained(original_max_position_embeddings)
    _check("factor", factor, 1 <= factor < math.inf, "a number that is 1 or more")
    good = 0 < low_freq_factor < high_freq_factor
    _check("low_freq_factor", low_freq_factor, good, f"between 0 and {high_freq_factor}")
    turns = original_max_position_embeddings * plain / (2 * math.pi)
    fast = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return plain / factor * (1 - fast) + plain * fast


def _check_trained(length: int) -> None:
    _check("original_max_position_embeddings", length, length > 0, "a number above 0")


def _check(name: str, value: float, good: bool, want: str) -> None:
    if not good:
        raise ValueError(f"rope_frequencies: {name} is {value}, expected {want}")
