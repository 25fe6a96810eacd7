"""A job that a launcher plug-in started as one of many ranks must not start a world of its own."""

import pytest

from automodel.config.errors import ConfigError
from automodel.launch.context import LaunchContext
from automodel.launch.task import refuse_foreign_ranks


def test_a_rank_of_another_launcher_is_refused():
    refuse_foreign_ranks(LaunchContext())
    with pytest.raises(ConfigError, match="hydra/launcher"):
        refuse_foreign_ranks(LaunchContext("submitit_slurm", 0, 2))
