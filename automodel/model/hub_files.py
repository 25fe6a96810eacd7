"""Single files of a model: in a folder, or under a name on the Hugging Face hub and in its cache."""

from __future__ import annotations

import os
from pathlib import Path

from automodel.config.errors import ConfigError

PATH_KEY = "model.pretrained_model_name_or_path"


def find_file(name_or_path: str, file: str, download: bool = True) -> Path | None:
    """Where ``file`` of a model is; None: the model has none.

    Args:
        name_or_path: a folder, or a model on the hub.
        file: its name, without a folder.
        download: fetch what the cache does not have, or has an older version of; else the cache alone counts.

    Raises:
        ConfigError: the hub did not give it.
    """
    folder = Path(os.path.expanduser(name_or_path))
    if Path(file).name != file:
        # The name may come from a file of the model, and must not lead out of its folder.
        return None
    if folder.is_dir():
        return folder / file if (folder / file).is_file() else None
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    cache_only = constants.HF_HUB_OFFLINE or not download
    try:
        return Path(hf_hub_download(name_or_path, file, local_files_only=cache_only))
    except EntryNotFoundError as error:
        # What is not in the cache is as good as absent only where nothing was to be fetched.
        if isinstance(error, LocalEntryNotFoundError) and not cache_only:
            raise _not_fetched(name_or_path, file, error) from error
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_fetched(name_or_path, file, error) from error


def _not_fetched(name: str, file: str, error: Exception) -> ConfigError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return ConfigError(
        PATH_KEY, name, f"{file} could not be fetched: {reason}", "a folder, or a model of the hub that can be reached"
    )
