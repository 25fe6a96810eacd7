"""Peaks by device name, and FLOPs of models counted by hand."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from automodel.training.mfu import mfu, model_flops_per_token, num_matmul_parameters, peak_flops


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
    ],
)
def test_known_gpus(name: str, teraflops: float) -> None:
    assert peak_flops(name) == pytest.approx(teraflops * 1e12)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090", "NVIDIA L40", "NVIDIA A10", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu", ""]
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


LLAMA3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def test_llama3_8b_by_hand() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LLAMA3_8B)
    # q and o; k and v with 8 of 32 heads; gate, up and down; then the head. The embedding is looked up.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    count = num_matmul_parameters(model, LLAMA3_8B)
    assert count == 32 * layer + 128256 * 4096 == 7_504_658_432
    # 12 * layers * hidden * sequence = 12 * 32 * 4096 * 8192 of attention.
    assert model_flops_per_token(LLAMA3_8B, count, 8192) == 6 * 7_504_658_432 + 12_884_901_888


def test_a_tied_embedding_counts_once_as_the_head() -> None:
    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    counts = []
    for tied in (False, True):
        config = LlamaConfig(**sizes, num_hidden_layers=1, tie_word_embeddings=tied)
        counts.append(num_matmul_parameters(LlamaForCausalLM(config), config))
    assert counts == [4 * 64 + 3 * 128 + 80] * 2


def test_a_token_uses_its_experts_only() -> None:
    config = MixtralConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    attention, router, head, expert = 4 * 64, 4 * 8, 80, 3 * 8 * 16
    assert num_matmul_parameters(model, config) == attention + router + head + 2 * expert


def test_head_dim_apart_from_the_hidden_size() -> None:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, head_dim=16, num_hidden_layers=3)
    assert model_flops_per_token(config, 0, 10) == 12 * 3 * 2 * 16 * 10


def test_mfu_is_the_share_of_all_devices() -> None:
    # 8 GPUs of 312 TFLOP/s that do 1,000 tokens/s of 624 GFLOP each: a quarter of 2,496 TFLOP/s.
    assert mfu(1000.0, 624 * 10**9, 8, 312e12) == pytest.approx(0.25)
