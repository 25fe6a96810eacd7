"""Computation in bf16 from fp32 master weights, and which policy holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from automodel.config.distributed import FSDP2Config, MixedPrecision
from automodel.distributed.blocks import transformer_blocks
from automodel.distributed.fsdp2 import FSDP2Manager
from automodel.distributed.gradients import local_square_sum
from automodel.distributed.mesh import MeshContext
from automodel.distributed.mixed_precision import cast_in_forward

BF16 = MixedPrecision("bfloat16", "float32", "float32")
FP32 = MixedPrecision("float32", "float32", "float32")


def build() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config).train()


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_parameters_are_cast_and_rotary_buffers_stay_fp32(whole_blocks: bool) -> None:
    model = build()
    seen: dict[str, set[torch.dtype]] = {}

    def watch(name: str, module: nn.Module) -> None:
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    seen.setdefault(f"{name}.{key}", set()).add(tensor.dtype)
            return inner(*args, **kwargs)

        module.forward = forward

    for name, module in model.named_modules():
        watch(name, module)
    cast_in_forward(model, BF16, transformer_blocks(model).values() if whole_blocks else ())
    logits = model(input_ids=torch.arange(8)[None], use_cache=False).logits
    assert logits.dtype == torch.float32
    buffers = {name for name in seen if "inv_freq" in name}
    assert buffers
    assert all(seen[name] == {torch.float32} for name in buffers)
    parameters = {name for name, _ in model.named_parameters()}
    assert all(seen[name] == {torch.bfloat16} for name in parameters)


@pytest.mark.parametrize("whole_blocks", [False, True])
def test_gradients_and_master_weights_are_fp32(whole_blocks: bool) -> None:
    model = build()
    cast_in_forward(model, BF16, transformer_blocks(model).values() if whole_blocks else ())
    model(input_ids=torch.arange(8)[None], use_cache=False).logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32, name
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name


def test_an_explicit_policy_wins_over_the_runs_precision() -> None:
    explicit = MixedPrecision("float32", "bfloat16", None)
    assert FSDP2Manager(FSDP2Config(mp_policy=explicit), MeshContext(), BF16).policy == explicit
    assert FSDP2Manager(FSDP2Config(), MeshContext(), FP32).policy == FP32
    assert FSDP2Manager(FSDP2Config(), MeshContext()).policy == MixedPrecision()


def test_the_sharded_policy_has_the_dtypes_asked_for() -> None:
    manager = FSDP2Manager(FSDP2Config(), MeshContext(), MixedPrecision("bfloat16", "float32", "float32"))
    root, block = manager._mp_policy(gives_logits=True), manager._mp_policy(gives_logits=False)
    assert (root.param_dtype, root.reduce_dtype, root.output_dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert (block.param_dtype, block.reduce_dtype, block.output_dtype) == (torch.bfloat16, torch.float32, None)


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    value = parameter.grad[0].item()
    # In bf16 the sum of squares would stop growing at 256 times its terms.
    square_sum = local_square_sum([parameter], 1, torch.device("cpu")).item()
    assert square_sum == pytest.approx(100_000 * value**2, rel=1e-3)
