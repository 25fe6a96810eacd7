"""Every model type of transformers that carries a tensor-parallel plan, small, on two ranks against one process.

``python -m tests.parity.tensor_parallel_walk`` writes docs/tensor_parallel_models.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from automodel.config.distributed import MixedPrecision
from automodel.config.errors import ConfigError
from automodel.distributed.mesh import MeshContext
from automodel.distributed.setup import setup_distributed
from automodel.distributed.tensor_parallel import resolve_plan
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from tests.parity.ranks import Ranks

TABLE = Path(__file__).parents[2] / "docs" / "tensor_parallel_models.md"
MODULE = "tests.parity.tensor_parallel_walk"
TOLERANCE = 1e-4
SEQ_LENGTH = 12

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_topk": 2,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "sliding_window": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "query_pre_attn_scalar": 16,
    "attention_dropout": 0.0,
}
LATENT: dict[str, Any] = {
    "head_dim": 8,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


def model_types() -> list[str]:
    """The causal language models whose configuration carries a tensor-parallel plan."""
    return sorted(
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)
    )


def tiny_model(model_type: str) -> Any:
    """On meta, of the sizes above where its configuration has them."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map or {})
    wanted = {**SIZES, **(LATENT if "kv_lora_rank" in fields else {})}
    if "num_local_experts" in fields:
        wanted.pop("num_experts")
    config = config_class(**{name: value for name, value in wanted.items() if name in fields})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.use_cache = False
    return model.eval()


@functools.cache
def _context(world_size: int, sequence_parallel: bool) -> MeshContext:
    section = {"tp_size": world_size, "sequence_parallel": sequence_parallel} if world_size > 1 else {}
    return setup_distributed(section, world_size, "cpu")


def _gradients(model_type: str, world_size: int, sequence_parallel: bool) -> tuple[float, dict[str, torch.Tensor]]:
    infrastructure = instantiate_infrastructure(
        _context(world_size, sequence_parallel), MixedPrecision("float32", "float32", "float32")
    )
    model = apply_model_infrastructure(tiny_model(model_type), infrastructure, seed=3)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(5))
    with infrastructure.manager.micro_batch(model, is_first=True, is_last=True):
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    whole = {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return loss.item(), whole


def compare(model_type: str) -> tuple[str, str, str]:
    """The cells of a model type's row; collective over two ranks."""
    try:
        plan = resolve_plan(tiny_model(model_type), None, 2)
        reference = _gradients(model_type, 1, False)
    except Exception as error:
        return (f"no small model: {_first_line(error)}",) * 2 + ("",)
    unused = ", ".join(f"`{name}`" for name in plan.unmatched)
    return _compare(model_type, False, reference), _compare(model_type, True, reference), unused


def _compare(model_type: str, sequence_parallel: bool, expected: tuple[float, dict[str, torch.Tensor]]) -> str:
    reference_loss, reference = expected
    try:
        loss, gradients = _gradients(model_type, dist.get_world_size(), sequence_parallel)
    except ConfigError as error:
        return f"refused: {error.rule}"
    except Exception as error:
        return f"fails: {_first_line(error)}"
    if gradients.keys() != reference.keys():
        return "not exact: gradients are missing"
    if not abs(loss - reference_loss) <= 1e-5 * max(1.0, abs(reference_loss)):
        return f"not exact: loss {loss:.5f} instead of {reference_loss:.5f}"
    largest = max(gradient.abs().max().item() for gradient in reference.values())
    errors = {
        name: ((gradients[name] - gradient).abs().max() / max(gradient.abs().max().item(), 1e-3 * largest)).item()
        for name, gradient in reference.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return "exact" if errors[worst] <= TOLERANCE else f"not exact: gradient of {worst} differs by {errors[worst]:.0e}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:90] if lines else ''}".replace("|", "/")


def walk(types: list[str]) -> Iterator[tuple[str, str, str, str]]:
    """Model type, result at tp 2, result with sequence parallelism, entries of its plan that name nothing."""
    ranks = Ranks(2)
    try:
        for model_type in types:
            try:
                yield (model_type, *ranks.run(f"{MODULE}:compare", model_type))
            except RuntimeError as error:
                yield (model_type, *[f"fails: {str(error).strip().splitlines()[-1][:90]}"] * 2, "")
    finally:
        ranks.close()


def write_table(rows: list[tuple[str, str, str, str]]) -> None:
    """docs/tensor_parallel_models.md."""
    exact = sum(row[1] == "exact" for row in rows)
    exact_sequence = sum(row[2] == "exact" for row in rows)
    lines = [
        "# Tensor parallelism, model type by model type",
        "",
        "Generated by `python -m tests.parity.tensor_parallel_walk`; not edited by hand. Each causal language model of",
        f"transformers {transformers.__version__} whose configuration carries a tensor-parallel plan, four layers",
        f"wide 64, on two ranks against one process (torch {torch.__version__}, fp32): *exact* means the same loss and",
        f"the same gradient of every parameter, within {TOLERANCE:.0e} of its largest value. The last column lists",
        "entries of the model's own plan that name nothing in the small model, such as parts of other variants.",
        "",
        f"Exact: {exact} of {len(rows)} with `tp_size=2`, {exact_sequence} of them also with `sequence_parallel=true`."
        if exact_sequence <= exact
        else f"Exact: {exact} of {len(rows)} with `tp_size=2`.",
        "",
        "| model type | `tp_size=2` | and `sequence_parallel=true` | unused entries |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
    TABLE.write_text("\n".join(lines))


def main() -> None:
    rows = []
    for row in walk(model_types()):
        rows.append(row)
        print(*row, sep=" | ", flush=True)
    write_table(rows)


if __name__ == "__main__":
    main()
