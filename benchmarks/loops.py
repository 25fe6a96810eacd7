"""What a rank of a benchmark runs: a bare PyTorch loop, or the product's own trainer, on the same model and data.

The model is a Llama with 8,392,960 parameters, in fp32; a step has 8 samples of 512 tokens in micro-batches of 2.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from automodel.config.schema import TrainConfig, load
from automodel.data import DataBundle, EpochSampler, TokenDataset, TrainLoader, byte_tokenizer
from automodel.distributed.mesh import MeshAxisName, MeshContext
from automodel.distributed.setup import setup_distributed
from automodel.model.build import build_config, build_model
from automodel.model.infrastructure import apply_model_infrastructure, instantiate_infrastructure
from automodel.training.lr_scheduler import build_lr_scheduler
from automodel.training.optimizer import build_optimizer
from automodel.training.run import mixed_precision
from automodel.training.trainer import Trainer, TrainingObserver

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SEQ_LENGTH, GLOBAL_BATCH_SIZE, LOCAL_BATCH_SIZE = 512, 8, 2
TOKENS_PER_STEP = GLOBAL_BATCH_SIZE * SEQ_LENGTH
NUM_SAMPLES = 256


class Loop(Protocol):
    """Implemented by :class:`BareLoop` and :class:`ProductLoop`."""

    model: nn.Module

    def step(self) -> None:
        """One optimizer step of TOKENS_PER_STEP tokens, over all ranks."""


class BareLoop:
    """What one would write without this product, with the same kernels; its batches are made beforehand."""

    def __init__(self) -> None:
        config = train_config({})
        self.model: nn.Module = AutoModelForCausalLM.from_config(build_config(config.model)).train()
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
        loader = train_loader(config, None)
        self.batches = [loader.next_step().micro_batches for _ in range(loader.steps_per_epoch)]
        self.num_steps = 0

    def step(self) -> None:
        micro_batches = self.batches[self.num_steps % len(self.batches)]
        self.num_steps += 1
        for micro_batch in micro_batches:
            logits = self.model(input_ids=micro_batch.input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), micro_batch.labels.flatten())
            (loss / len(micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class ProductLoop:
    """The product's own trainer, loader, optimizer and metrics; collective."""

    def __init__(self, distributed: dict[str, Any], world_size: int) -> None:
        config = train_config(distributed)
        mesh_context = setup_distributed(config.distributed, world_size, "cpu")
        infrastructure = instantiate_infrastructure(mesh_context, mixed_precision(config.precision))
        model = build_model(build_config(config.model), config.model)
        self.model: nn.Module = apply_model_infrastructure(model, infrastructure, config.seed)
        optimizer = build_optimizer(self.model, config.optimizer)
        loader = train_loader(config, mesh_context)
        self.trainer = Trainer(
            config=config,
            mesh_context=mesh_context,
            model=self.model,
            manager=infrastructure.manager,
            optimizer=optimizer,
            lr_scheduler=build_lr_scheduler(optimizer, config.lr_scheduler, 1),
            data=DataBundle(byte_tokenizer(), loader.dataset, None, MODEL["vocab_size"] - 1),
            loader=loader,
            total_steps=0,
            observer=TrainingObserver(),
            stop_requested=lambda: False,
        )

    def step(self) -> None:
        self.trainer.total_steps += 1
        self.trainer.train()


def train_config(distributed: dict[str, Any]) -> TrainConfig:
    """The run's settings: AdamW, clipping to 1, fp32."""
    return load(
        {
            "model": {"model_type": "llama", "config": MODEL, "init": "random"},
            "precision": dict.fromkeys(("param_dtype", "reduce_dtype", "output_dtype"), "float32"),
            "lr_scheduler": {"name": "constant"},
            "training": {
                "max_steps": 1,
                "global_batch_size": GLOBAL_BATCH_SIZE,
                "local_batch_size": LOCAL_BATCH_SIZE,
                "seq_length": SEQ_LENGTH,
                "val_at_end": False,
            },
            "distributed": distributed,
        }
    )


def train_loader(config: TrainConfig, mesh_context: MeshContext | None) -> TrainLoader:
    """Random tokens, through the product's own loader. None: all of them on this rank."""
    tokens = np.random.default_rng(7).integers(0, MODEL["vocab_size"], NUM_SAMPLES * SEQ_LENGTH + 1)
    dataset = TokenDataset(tokens, SEQ_LENGTH)
    dp_rank, dp_size = (mesh_context.axis_rank(MeshAxisName.DP), mesh_context.dp_size) if mesh_context else (0, 1)
    sampler = EpochSampler(len(dataset), config.seed)
    return TrainLoader(dataset, sampler, GLOBAL_BATCH_SIZE, LOCAL_BATCH_SIZE, dp_rank, dp_size)


class HeldBytes:
    """Watches the most bytes of parameters and gradients that exist at once, through public hooks.

    A sharded block's parameters are other objects while they are gathered, so each module's own are noted whenever it
    runs. Storages that the strategy has freed count zero; buffers of a running collective are not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.peak = 0
        self._parameters: dict[int, nn.Parameter] = {id(parameter): parameter for parameter in model.parameters()}
        owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
        self._handles = [module.register_forward_hook(self._sample) for module in owners]

    def _sample(self, module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in self._parameters:
                self._parameters[id(parameter)] = parameter
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._measure))
        self._measure()

    def _measure(self, *_: Any) -> None:
        storages: dict[int, int] = {}
        for parameter in self._parameters.values():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(storages.values()))

    def close(self) -> None:
        """Take the hooks off the model; ``peak`` stays."""
        for handle in self._handles:
            handle.remove()
