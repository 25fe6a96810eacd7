"""Model FLOPs utilization: how much of a GPU's peak the model's own arithmetic uses."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

# First match wins. The name is what torch.cuda.get_device_name returns, e.g. "NVIDIA H100 80GB HBM3".
_PEAKS: list[tuple[str, float]] = [
    (r"\bA100\b", 312e12),
    (r"\bH100 NVL\b", 835.5e12),
    (r"\bH100 PCIe\b", 756e12),
    (r"\bH100\b", 989.4e12),
    (r"\bH200 NVL\b", 835.5e12),
    (r"\bH200\b", 989.4e12),
    (r"\bB200\b", 2250e12),
    (r"\bL40S\b", 362.05e12),
    (r"\bA10G\b", 70e12),
    (r"\bL4\b", 121e12),
    (r"\bV100S\b", 130e12),
    (r"\bV100-PCIE\b", 112e12),
    (r"\bV100\b", 125e12),
]


def peak_flops(device_name: str) -> float | None:
    """Dense (not sparse) bf16 tensor-core peak of a GPU in FLOP/s, or None when it is not known.

    V100 has no bf16; its number is fp16. A MIG slice is not a whole GPU: None. Sources, NVIDIA's data
    sheets, halved where they state the sparse number:

    - A100: nvidia.com/en-us/data-center/a100 (312)
    - H100 SXM 1979/2, NVL 1671/2, PCIe 1513/2: nvidia.com/en-us/data-center/h100
    - H200 SXM 1979/2, NVL 1671/2: nvidia.com/en-us/data-center/h200
    - B200 4500/2: nvidia.com/en-us/data-center/hgx (an eighth of HGX B200)
    - L40S 362.05: nvidia.com/en-us/data-center/l40s; L4 242/2: nvidia.com/en-us/data-center/l4
    - A10G 70: AWS's variant of the A10, aws.amazon.com/ec2/instance-types/g5
    - V100 SXM2 125, PCIe 112, V100S 130: nvidia.com/en-us/data-center/v100
    """
    if re.search(r"\bMIG\b", device_name):
        return None
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name, re.IGNORECASE)), None)


def num_matmul_parameters(model: nn.Module, config: Any) -> int:
    """Parameters that a token is multiplied with: N in :func:`model_flops_per_token`.

    Vectors (norms, biases) are left out, and so is an input embedding, which is looked up; where it is
    tied to the output head it counts once, as the head. Of the experts of a layer, kept in one
    parameter of shape [experts, ..., ...], a token uses ``num_experts_per_tok``.

    Args:
        model: the whole model, also on the meta device; DTensors count by their global shape.
        config: its Hugging Face configuration.
    """
    text = _text_config(config)
    experts_per_token = getattr(text, "num_experts_per_tok", None)
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    total = 0
    for parameter in model.parameters():
        if parameter.ndim < 2 or id(parameter) in looked_up - multiplied:
            continue
        count = parameter.numel()
        if experts_per_token and parameter.ndim == 3 and parameter.shape[0] == num_experts:
            count = count * experts_per_token // num_experts
        total += count
    return total


def model_flops_per_token(config: Any, num_matmul_parameters: int, seq_length: int) -> int:
    """FLOPs of forward and backward per token: 6 N + 12 L H Q T.

    Appendix B of PaLM (Chowdhery et al., 2022, arXiv:2204.02311): N parameters in matrix products, L
    layers, H heads of Q values, T tokens of a sequence. Recomputation (activation checkpointing) does
    not count, and the attention term is the full square, as in the paper: the causal half is not
    subtracted.

    Args:
        config: a Hugging Face configuration: ``num_hidden_layers``, ``num_attention_heads``, and
            ``head_dim`` or ``hidden_size``.
        num_matmul_parameters: N; see the function of this name.
        seq_length: T.
    """
    text = _text_config(config)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = 12 * text.num_hidden_layers * text.num_attention_heads * head_dim * seq_length
    return 6 * num_matmul_parameters + attention


def mfu(tokens_per_second: float, flops_per_token: int, num_devices: int, peak: float) -> float:
    """Share of the peak that the model's arithmetic uses, 0 to 1.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: from :func:`model_flops_per_token`.
        num_devices: all devices of the run, whatever they are used for.
        peak: FLOP/s of one device, from :func:`peak_flops`.
    """
    return tokens_per_second * flops_per_token / (num_devices * peak)


def _text_config(config: Any) -> Any:
    """The language model's part of a configuration that nests several."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config
