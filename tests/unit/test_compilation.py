"""Blocks are really compiled, once for all of a kind, under the names they had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from automodel.config.distributed import ActivationCheckpointing, FSDP2Config, MixedPrecision
from automodel.distributed import compilation
from automodel.distributed.activation_checkpointing import apply_activation_checkpointing
from automodel.distributed.compilation import blocks_to_cast_whole, compile_blocks
from automodel.distributed.mesh import MeshContext
from automodel.distributed.mixed_precision import cast_in_forward

BF16 = MixedPrecision("bfloat16", "float32", "float32")


def build() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=10, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config).train()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    model(input_ids=torch.arange(12)[None], use_cache=False).logits.float().logsumexp(-1).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", [False, "full", "selective"])
def test_ten_blocks_share_one_graph_and_keep_names_and_numbers(
    mode: ActivationCheckpointing, precision: MixedPrecision | None
) -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    context = MeshContext(strategy_config=FSDP2Config(enable_compile=True), activation_checkpointing=mode)
    plain, compiled = build(), build()
    names = list(compiled.state_dict())
    apply_activation_checkpointing(compiled, mode)
    torch.compiler.reset()
    with mock.patch.object(compilation, "BACKEND", count):
        compile_blocks(compiled)
    if precision is not None:
        cast_in_forward(plain, precision)
        cast_in_forward(compiled, precision, blocks_to_cast_whole(compiled, context))
    expected, found = gradients(plain), gradients(compiled)
    assert len(graphs) == 1
    assert list(compiled.state_dict()) == names
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
