"""Weights from Hugging Face's safetensors files into a sharded model: each rank reads its own slices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from transformers import PreTrainedModel

from automodel.config.errors import ConfigError
from automodel.model.checkpoint_names import NeedsConversion, SavedTensor, ignored_keys, names_of_keys, saved_tensors
from automodel.model.hub_files import PATH_KEY
from automodel.model.safetensors_files import Run, SafetensorsFiles

__all__ = ["PretrainedWeights", "check_pretrained_weights", "local_runs"]

FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_SHOWN = 8


class PretrainedWeights:
    """The weights of a checkpoint, matched to a model by name before anything is sharded.

    Args:
        model: whole, on meta.
        name_or_path: a folder with safetensors files, or a name on the hub.
        download: see :func:`automodel.model.hub_files.find_file`.

    Attributes:
        total_bytes: of the tensors that the model takes.

    Raises:
        ConfigError: lists what is missing, unexpected, or of another shape or type; or see
            :class:`~automodel.model.safetensors_files.SafetensorsFiles`.
    """

    def __init__(self, model: PreTrainedModel, name_or_path: str, download: bool = True) -> None:
        self.files = SafetensorsFiles(name_or_path, download)
        try:
            self.tensors = saved_tensors(model)
            names = names_of_keys(model, self.files.tensors)
        except NeedsConversion as error:
            raise ConfigError(
                PATH_KEY,
                name_or_path,
                f"{type(model).__name__} puts tensors of these files together or takes them apart, which is not "
                f"supported by this version: {error}",
                "a model whose files hold its tensors one by one, or model.init=random",
            ) from error
        by_name = {name: tensor for tensor in self.tensors for name in tensor.names}
        # Tensor -> its keys in the files, the one it is saved under first.
        self._keys: dict[str, list[str]] = {tensor.name: [] for tensor in self.tensors}
        unexpected = []
        for key, name in names.items():
            if name in by_name:
                self._keys[by_name[name].name].append(key)
            else:
                unexpected.append(key)
        self._check(model, unexpected)
        self._sources = {name: self._keys[tensor.name][0] for name, tensor in by_name.items()}
        stored = (self.files.tensors[keys[0]] for keys in self._keys.values())
        self.total_bytes = sum(_num_bytes(tensor.shape, tensor.dtype) for tensor in stored)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this rank has read."""
        return self.files.bytes_read

    def load_into(self, model: nn.Module) -> None:
        """Fill parameters and saved buffers, in place; values are converted to the dtype that the model has.

        Args:
            model: the model or a pipeline stage of it, with the whole model's names; parameters plain or DTensors of
                any placement, with storage.
        """
        seen: set[int] = set()
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if local.numel():
                    self.files.read_into(self._sources[name], local.detach(), local_runs(tensor))
        self.files.close()

    def check_ties(self) -> None:
        """Hold the stored copies of tied tensors against each other; reads both.

        Raises:
            ConfigError: they differ, so that one of them would be dropped.
        """
        for tensor in self.tensors:
            first, *others = self._keys[tensor.name]
            for other in others:
                if not self.files.same(first, other):
                    raise ConfigError(
                        "model.config.tie_word_embeddings",
                        True,
                        f"{self.files.name} holds different values for {first} and {other}, which the model ties",
                        "false, which trains both",
                    )

    def _check(self, model: PreTrainedModel, unexpected: list[str]) -> None:
        ignored = ignored_keys(model, unexpected)
        problems = {
            "missing": [tensor.key for tensor in self.tensors if not self._keys[tensor.name]],
            "unexpected": [key for key in unexpected if key not in ignored],
            "other shape or type": [
                problem
                for tensor in self.tensors
                for key in self._keys[tensor.name]
                if (problem := self._misfit(key, tensor))
            ],
        }
        lines = [
            f"{kind} ({len(found)}): {', '.join(found[:_SHOWN])}{', ...' if len(found) > _SHOWN else ''}"
            for kind, found in problems.items()
            if found
        ]
        if lines:
            raise ConfigError(
                PATH_KEY,
                self.files.name,
                "\n         ".join([f"its weights are not those of this {type(model).__name__}", *lines]),
                "weights of the same model, model.config fields that do not change its tensors, or model.init=random",
            )

    def _misfit(self, key: str, tensor: SavedTensor) -> str | None:
        stored = self.files.tensors[key]
        if stored.shape != tensor.shape:
            return f"{key} is {list(stored.shape)} in the file and {list(tensor.shape)} in the model"
        if tensor.dtype.is_floating_point and stored.dtype not in FLOAT_DTYPES:
            return f"{key} is {stored.dtype} in the file"
        return None


def check_pretrained_weights(model: PreTrainedModel, name_or_path: str) -> None:
    """Everything that can be wrong with a checkpoint's files, from their headers, before a rank starts.

    The files of a hub name are downloaded here, once, and not by every rank.

    Args:
        model: whole, on meta.

    Raises:
        ConfigError: see :class:`PretrainedWeights` and its ``check_ties``.
    """
    PretrainedWeights(model, name_or_path).check_ties()


def local_runs(tensor: Tensor) -> list[list[Run]]:
    """For each dim, the ranges [start, end) of the whole tensor that this rank's part is made of.

    The placements themselves cut a list of indices, one dim after the other, so every kind of placement is right,
    uneven, twice cut and packed ones too.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    return [_runs(_local_indices(tensor, dim)) for dim in range(tensor.ndim)]


def _local_indices(tensor: DTensor, dim: int) -> list[int]:
    placements = [
        placement if getattr(placement, "dim", None) == dim else Replicate() for placement in tensor.placements
    ]
    shape = [1] * tensor.ndim
    shape[dim] = tensor.shape[dim]
    indices = torch.arange(tensor.shape[dim], device=tensor.device_mesh.device_type).view(shape)
    local = distribute_tensor(indices, tensor.device_mesh, placements, src_data_rank=None).to_local()
    return local.flatten().tolist()


def _runs(indices: list[int]) -> list[Run]:
    runs: list[Run] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    count = 1
    for size in shape:
        count *= size
    # safetensors' names of types end in the number of bits, but for BOOL.
    bits = "".join(character for character in dtype.partition("_")[0] if character.isdigit())
    return count * (int(bits) // 8 if bits else 1)
