"""Names of a model's tensors in Hugging Face's files: the only file that reaches into transformers' conversion rules.

Private names of transformers used here, tried with 5.24: ``conversion_mapping.get_model_conversion_mapping``,
``core_model_loading`` (``rename_source_key``, ``revert_weight_conversion``, ``WeightConverter``, ``WeightRenaming``)
and a model's ``all_tied_weights_keys`` and ``_keys_to_ignore_on_load_unexpected``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["NeedsConversion", "SavedTensor", "ignored_keys", "names_of_keys", "saved_tensors"]


class NeedsConversion(Exception):
    """Tensors of the files are put together or taken apart on their way into the model; the text names some."""


@dataclass(frozen=True)
class SavedTensor:
    """A parameter or saved buffer of a whole model.

    Attributes:
        names: in the model; a tied one has several, and the first counts.
        key: in the files.
        shape: of the whole tensor.
        dtype: in the model.
        is_parameter: buffers keep their dtype in the files.
    """

    names: tuple[str, ...]
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool

    @property
    def name(self) -> str:
        return self.names[0]


def saved_tensors(model: PreTrainedModel) -> list[SavedTensor]:
    """Everything that the files of ``model`` hold, in the model's order.

    Args:
        model: whole, before anything is sharded; on any device, meta too.

    Raises:
        NeedsConversion: its files hold tensors of another form.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    chosen = {key: next((name for name in group if name not in tied), group[0]) for key, group in names.items()}
    # Stand-ins without elements: what comes back as it went in was renamed at most.
    stand_ins = {name: torch.empty(0, device="meta") for name in chosen.values()}
    known = {id(stand_in): name for name, stand_in in stand_ins.items()}
    try:
        reverted = revert_weight_conversion(model, dict(stand_ins))
    except Exception as error:  # conversions of any kind meet tensors without elements
        raise NeedsConversion(f"{type(model).__name__}: {error}") from error
    keys = {known[id(tensor)]: key for key, tensor in reverted.items() if id(tensor) in known}
    converted = [name for name in stand_ins if name not in keys]
    if converted:
        raise NeedsConversion(", ".join(converted[:5]))
    return [
        SavedTensor(
            tuple(group),
            keys[chosen[key]],
            tuple(tensors[key].shape),
            tensors[key].dtype,
            isinstance(tensors[key], nn.Parameter),
        )
        for key, group in names.items()
    ]


def names_of_keys(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Key in the files -> name of a tensor of ``model``, or the key as far as the rules rename it.

    Raises:
        NeedsConversion: keys that are put together or taken apart.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    prefix, state = model.base_model_prefix, model.state_dict(keep_vars=True)
    names, converted = {}, []
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if pattern is not None:
            converted.append(key)
        names[key] = name
    if converted:
        raise NeedsConversion(", ".join(converted[:5]))
    return names


def ignored_keys(model: PreTrainedModel, keys: Iterable[str]) -> set[str]:
    """Those of ``keys`` that the model's class passes over, such as buffers that old files hold."""
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    # The two that transformers adds for every model.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.append(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.append(r"(^|\.)position_ids$")
    return {key for key in keys if any(re.search(pattern, key) for pattern in patterns)}
