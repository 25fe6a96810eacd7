"""A causal language model that returns its loss instead of its logits.

The head's forward is replaced on the instance: where labels are given to the model, the head computes the loss
of the hidden states it is handed, inside the model's own forward, so it sees whatever parameters a strategy has
gathered or cast there, and whatever the model does to its hidden states before the head. What the model does
to its logits *after* the head is read from its configuration and held against the model itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from automodel.config.errors import ConfigError
from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup, gather_slices
from automodel.model.linear_cross_entropy import LogitTransform, VocabularyShard, linear_cross_entropy_sum

# Names by which configurations of transformers give a factor, a divisor and a soft cap of the logits.
FACTOR_FIELDS = ("logit_scale", "lm_head_multiplier")
DIVISOR_FIELDS = ("logits_scaling",)
SOFT_CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap")


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """The scale and soft cap that a model's configuration names; the identity where it names none."""
    text_config = config.get_text_config()
    scale = 1.0
    for name in FACTOR_FIELDS:
        scale *= _number(text_config, name) or 1.0
    for name in DIVISOR_FIELDS:
        scale /= _number(text_config, name) or 1.0
    caps = [cap for name in SOFT_CAP_FIELDS if (cap := _number(text_config, name)) is not None]
    return LogitTransform(scale, caps[0] if caps else None)


def _number(config: PretrainedConfig, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def check_output_head(model: PreTrainedModel) -> tuple[nn.Linear, LogitTransform]:
    """The head of ``model`` and what happens to its output, held against the model's own forward.

    The model's forward runs on four tokens without its blocks and with a head that returns known numbers, large
    enough for a soft cap to show; its logits must be the transform of these. Works on meta, before any weight exists.

    Raises:
        ConfigError: the head is not a linear layer called once, or the model does something else to its logits.
    """
    head = model.get_output_embeddings()
    name = type(model).__name__
    if not isinstance(head, nn.Linear):
        raise _refusal(name, "its output head is not a linear layer")
    device = head.weight.device
    known: list[Tensor] = []

    def known_output(hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], head.out_features)
        known.append(torch.linspace(-100.0, 100.0, math.prod(shape)).view(shape))
        return known[-1]

    def no_blocks(*_: Any, **__: Any) -> _BlocksOutput:
        return _BlocksOutput(last_hidden_state=torch.zeros((1, 4, head.in_features), device=device))

    try:
        with _forwards_replaced({head: known_output, _body(model): no_blocks}), torch.no_grad():
            input_ids = torch.zeros((1, 4), dtype=torch.int64, device=device)
            logits = model(input_ids=input_ids, use_cache=False).logits
    except Exception as error:  # of any kind, from any of a hundred models
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _refusal(name, f"its forward could not be examined: {first_line}") from error
    if len(known) != 1 or known[0].shape[:-1] != (1, 4):
        raise _refusal(name, "it does not call its output head once for all tokens")
    # MiniCPM3 names a divisor, and divides by it before the head, where the head's own input shows it.
    for transform in (logit_transform(model.config), LogitTransform()):
        expected = transform(known[0])
        if logits.shape == expected.shape and torch.allclose(logits.float(), expected, rtol=1e-5, atol=1e-4):
            return head, transform
    raise _refusal(name, "it changes its logits in a way that its configuration does not name")


def _body(model: PreTrainedModel) -> nn.Module:
    """What makes the hidden states; a few models have another attribute than their class says (Llama 4)."""
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if model.base_model is model and inner else model.base_model


class _BlocksOutput(MoeModelOutputWithPast):
    """Hidden states, and None for whatever else a model's own output class may have."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                del module.forward
            else:
                module.forward = own


def _refusal(class_name: str, reason: str) -> ConfigError:
    return ConfigError(
        "training.loss",
        "linear_cross_entropy",
        f"{class_name} does not fit this loss: {reason}",
        "cross_entropy",
    )


class LossHead:
    """Lets ``model`` take ``shifted_labels`` and return its summed loss; names of parameters do not change.

    ``model(input_ids=..., shifted_labels=...)`` with labels ``[batch, seq]``, already shifted, returns the model's
    output with ``loss``, shape [], fp32, and without logits. Called without labels it returns logits as before.

    Args:
        model: as transformers made it, on any device.

    Raises:
        ConfigError: see :func:`check_output_head`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.head, self.transform = check_output_head(model)
        self.labels: Tensor | None = None
        self.loss: Tensor | None = None

    def install(self) -> None:
        """Replace the forwards of the model and of its head, in place; once, after the head is sharded."""
        self.model_forward, self.head_forward = self.model.forward, self.head.forward
        self.model.forward = self._forward_model
        self.head.forward = self._forward_head  # type: ignore[method-assign, assignment]

    def _forward_model(self, *args: Any, shifted_labels: Tensor | None = None, **kwargs: Any) -> Any:
        if shifted_labels is None:
            return self.model_forward(*args, **kwargs)
        self.labels = shifted_labels
        try:
            output = self.model_forward(*args, **kwargs)
            loss = self.loss
        finally:
            self.labels = self.loss = None
        if loss is None:
            raise RuntimeError(f"the output head of {type(self.model).__name__} was not called")
        # A new output: in the model's own the logits are the head's placeholder.
        return type(output)(**{**output, "loss": loss, "logits": None})

    def _forward_head(self, hidden: Tensor) -> Tensor:
        if self.labels is None:
            logits: Tensor = self.head_forward(hidden)
            return logits
        self.loss = head_loss(self.head, hidden, self.labels, self.transform)
        return hidden.new_zeros((*hidden.shape[:-1], 1))


def head_loss(head: nn.Linear, hidden: Tensor, labels: Tensor, transform: LogitTransform) -> Tensor:
    """Summed loss of hidden states ``[batch, seq, hidden]`` for labels ``[batch, seq]``, shape [].

    Args:
        head: weight and bias plain, or DTensors with the vocabulary cut over the tensor-parallel axis.
        hidden: plain; whole on every rank of that axis, or under sequence parallel this rank's slice of the sequence.
    """
    weight: Tensor = head.weight
    bias: Tensor | None = head.bias
    shard = None
    if isinstance(weight, DTensor):
        group = TensorParallelGroup(weight.device_mesh)
        if hidden.shape[1] != labels.shape[1]:
            hidden = gather_slices(hidden, group, 1, labels.shape[1])
        shard = vocabulary_shard(weight, group)
        weight = weight.to_local()
        bias = bias.to_local() if isinstance(bias, DTensor) else bias
    return linear_cross_entropy_sum(hidden.flatten(0, -2), weight, labels.flatten(), bias, transform, shard)


def vocabulary_shard(weight: DTensor, group: TensorParallelGroup) -> VocabularyShard | None:
    """Which rows ``[vocab, hidden]`` of a head this rank holds; None: all of them.

    Raises:
        ValueError: the weight is cut in another dimension than the vocabulary.
    """
    (placement,) = weight.placements
    if placement.is_replicate():
        return None
    if placement != Shard(0):
        raise ValueError(f"the output head must be cut over the vocabulary, not {placement}")
    return VocabularyShard(group.process_group, group.bounds(weight.shape[0])[0])
