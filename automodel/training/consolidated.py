"""The folder ``hf``: the trained model as Hugging Face's libraries load it, with configuration and tokenizer."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from automodel.config.schema import TrainConfig
from automodel.distributed.mixed_precision import dtype_of
from automodel.model.build import build_config
from automodel.model.checkpoint_names import saved_tensors
from automodel.model.export import ExportError, export_model
from automodel.model.hub_files import find_file
from automodel.training.checkpoint.folder import step_folder
from automodel.training.checkpoint.saver import CheckpointSaver

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["FOLDER", "Consolidation", "side_files"]

_LOG = logging.getLogger(__name__)
FOLDER = "hf"
GENERATION_FILE = "generation_config.json"


class Consolidation:
    """Writes the model of a run, where ``checkpoint.save_consolidated`` asks for it.

    Args:
        config: of the run.
        model: whole, on meta, before it is sharded.
        tokenizer: of the run; stands beside the weights.
        rank: of this process; rank 0 speaks for all.
    """

    def __init__(
        self, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rank: int
    ) -> None:
        self._rank = rank
        self._config = config.checkpoint
        self._when = config.checkpoint.save_consolidated
        self._last_step: int | None = None
        self._dtype = dtype_of(config.checkpoint.export_dtype)
        self._tensors = saved_tensors(model) if self._when != "never" else []
        self._side_files = side_files(config, type(model).__name__, tokenizer)

    def after_checkpoint(self, trained: nn.Module, saver: CheckpointSaver, step: int) -> None:
        """Inside the checkpoint of ``step``, once it is whole: ``checkpoints/step_<N>/hf``. Collective.

        Raises:
            ExportError: it could not be written, and ``checkpoint.on_failure`` is stop.
        """
        if self._when != "every" or self._last_step == step:
            return
        # The step's folder appears in one rename, and a folder that stood there before would give way to it.
        saver.wait()
        if saver.saved_step == step:
            self._last_step = step
            self._write(trained, step_folder(saver.run_dir, step) / FOLDER)

    def at_end(self, trained: nn.Module, run_dir: Path) -> None:
        """At the end of a run: ``<run folder>/hf``. Collective.

        Raises:
            ExportError: as for checkpoints.
        """
        if self._when != "never":
            self._write(trained, run_dir / FOLDER)

    def _write(self, trained: nn.Module, folder: Path) -> None:
        started = time.perf_counter()
        assert self._dtype is not None
        try:
            export_model(trained, self._tensors, folder, self._dtype, self._side_files)
        except ExportError as error:
            if self._config.on_failure == "stop":
                raise
            if self._rank == 0:
                _LOG.warning("%s; the run goes on (checkpoint.on_failure=warn)", error)
            return
        if self._rank == 0:
            _LOG.info("wrote %s in %.1f s", folder, time.perf_counter() - started)


def side_files(config: TrainConfig, architecture: str, tokenizer: PreTrainedTokenizerBase) -> Callable[[Path], None]:
    """What writes everything but the weights into a folder.

    Args:
        config: of the run; ``checkpoint.export_dtype`` is what the weights there have.
        architecture: the model's class name.
    """

    def write(folder: Path) -> None:
        from transformers import GenerationConfig

        # Built anew: the one in training has its cache switched off, which is training's own affair.
        hf_config = build_config(config.model)
        hf_config.architectures = [architecture]
        hf_config.dtype = dtype_of(config.checkpoint.export_dtype)
        hf_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        source = config.model.pretrained_model_name_or_path
        own = find_file(source, GENERATION_FILE, download=False) if source is not None else None
        if own is not None and _ends_text_with(tokenizer.eos_token_id, own):
            shutil.copyfile(own, folder / GENERATION_FILE)
            return
        # The documents that the model learned from end with this tokenizer's token, whatever the model's defaults say.
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(folder)

    return write


def _ends_text_with(token_id: object, generation_file: Path) -> bool:
    """Whether a generation config stops at this token."""
    try:
        stops = json.loads(generation_file.read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return False
    return token_id in stops if isinstance(stops, list) else token_id == stops
