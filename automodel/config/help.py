"""What ``--help`` prints, without composing a config.

Hydra's own answer lists every group a dozen times over and takes more than a second.
"""

from __future__ import annotations

import string
from pathlib import Path


def help_text(conf_dir: Path) -> str:
    """The help template of ``conf_dir`` with the groups and choices that lie there.

    Args:
        conf_dir: the folder of Hydra configs; the template is ``hydra/help/automodel.yaml`` in it.
    """
    from omegaconf import OmegaConf

    template = OmegaConf.select(OmegaConf.load(conf_dir / "hydra" / "help" / "automodel.yaml"), "template")
    groups = [f"  {group}: {', '.join(choices)}\n" for group, choices in group_choices(conf_dir).items()]
    return string.Template(template).substitute(APP_CONFIG_GROUPS="".join(groups))


def group_choices(conf_dir: Path) -> dict[str, list[str]]:
    """The config groups of ``conf_dir``, without Hydra's own, each with its choices."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(conf_dir.iterdir())
        if folder.is_dir() and folder.name != "hydra"
    }
