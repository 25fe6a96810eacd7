"""The files of conf/: each composes, and presets compose what they promise."""

from __future__ import annotations

import logging
import re

import pytest
from composing import CONF, broken_rule, compose_config, compose_node, refusal

from automodel.config.help import group_choices, help_text

CHOICES = [(group, choice) for group, choices in group_choices(CONF).items() for choice in choices]
# These two name nothing of their own: what they need to be a complete run.
NEEDS = {("model", "hf"): ["model.pretrained_model_name_or_path=./somewhere"], ("data", "text"): ["data.files=a.txt"]}


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda value: value)
def test_every_choice_of_every_group_composes_and_keeps_all_rules(group: str, choice: str) -> None:
    config = compose_config(f"{group}={choice}", *NEEDS.get((group, choice), []))
    error = broken_rule(config)
    if (group, choice) in {("logger", "wandb"), ("logger", "mlflow"), ("logger", "tensorboard")}:
        assert error is None or "is not installed" in error.rule
    else:
        assert error is None, str(error)


def test_every_choice_explains_itself() -> None:
    for group, choice in CHOICES:
        text = (CONF / group / f"{choice}.yaml").read_text()
        assert re.search(r"^# (?!@package)\S", text, re.MULTILINE), f"{group}/{choice}.yaml has no comment"


def test_the_default_run_is_legal_on_one_process() -> None:
    config = compose_config()
    assert refusal(config) is None
    assert config.distributed.strategy == "fsdp2"
    assert config.distributed.smallest_world() == 1
    assert (config.training.global_batch_size, config.training.local_batch_size) == (8, 2)
    assert (config.precision.param_dtype, config.precision.reduce_dtype) == ("bfloat16", "float32")
    assert (config.optimizer.name, config.lr_scheduler.name, config.model.init) == ("adamw", "cosine", "random")


def test_tiny_llama_is_divided_by_tp8_and_by_pp4_with_two_stages_a_rank() -> None:
    sizes = compose_config("model=tiny_llama").model.config
    assert sizes["num_attention_heads"] == sizes["num_key_value_heads"] == sizes["num_hidden_layers"] == 8
    assert sizes["vocab_size"] == 264
    assert sizes["head_dim"] * sizes["num_attention_heads"] == sizes["hidden_size"]


PRESETS = {
    "hsdp": ({"dp_replicate_size": 2}, "1f1b", 2, 4),
    "fsdp2_tp2": ({"tp_size": 2}, "1f1b", 2, 2),
    "fsdp2_pp2": ({"pp_size": 2}, "1f1b", 8, 2),
    "fsdp2_tp2_pp2": ({"tp_size": 2, "pp_size": 2}, "1f1b", 8, 4),
    "fsdp2_tp8_pp4": ({"tp_size": 8, "pp_size": 4}, "interleaved_1f1b", 8, 32),
    "fsdp2_tp4_pp8": ({"tp_size": 4, "pp_size": 8}, "1f1b", 8, 32),
    "fsdp2_cp2": ({"cp_size": 2}, "1f1b", 2, 2),
    "fsdp2_ep2": ({"ep_size": 2}, "1f1b", 2, 2),
    "fsdp2_ep8": ({"ep_size": 8}, "1f1b", 1, 8),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_composes_its_sizes_on_top_of_fsdp2(preset: str) -> None:
    sizes, schedule, local_batch_size, world_size = PRESETS[preset]
    config = compose_config(f"distributed={preset}")
    default = compose_config().distributed
    for name in ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size"):
        assert getattr(config.distributed, name) == sizes.get(name, getattr(default, name))
    assert config.distributed.strategy_config == default.strategy_config
    assert config.distributed.pipeline.pp_schedule == schedule
    assert config.training.local_batch_size == local_batch_size
    assert config.distributed.smallest_world() == world_size


def test_the_command_line_wins_over_a_preset() -> None:
    config = compose_config(
        "distributed=fsdp2_tp8_pp4",
        "pipeline=zero_bubble",
        "distributed.tp_size=4",
        "training.local_batch_size=4",
        "distributed.pipeline.pp_microbatch_size=2",
        "distributed.moe.reshard_after_forward=true",
    )
    assert (config.distributed.tp_size, config.distributed.pp_size) == (4, 4)
    assert config.distributed.pipeline.pp_schedule == "zero_bubble"
    assert config.distributed.pipeline.pp_microbatch_size == 2
    assert config.distributed.moe.reshard_after_forward
    assert config.training.local_batch_size == 4


def test_experiments_override_groups_and_values_and_the_command_line_wins_over_them() -> None:
    config = compose_config("experiment=hsdp_parity")
    assert config.distributed.dp_replicate_size == 2
    assert (config.precision.param_dtype, config.optimizer.name, config.lr_scheduler.name) == (
        "float32",
        "sgd",
        "constant",
    )
    reference = compose_config("experiment=hsdp_parity", "distributed=ddp", "distributed.dp_size=1")
    assert (reference.distributed.strategy, reference.distributed.smallest_world()) == ("ddp", 1)
    assert compose_config("experiment=debug").training.max_steps == 3
    assert compose_config("experiment=debug", "training.max_steps=5").training.max_steps == 5


def test_the_composed_section_is_the_one_of_the_contract() -> None:
    section = compose_node().distributed
    assert section.dp_size == "none"
    assert dict(section.pipeline) == {
        "pp_schedule": "1f1b",
        "pp_microbatch_size": 1,
        "scale_grads_in_schedule": False,
        "layers_per_stage": None,
        "module_fqns_per_model_part": None,
        "pp_schedule_csv": None,
        "round_virtual_stages_to_pp_multiple": None,
        "pp_plan": None,
    }
    assert dict(section.moe) == {
        "reshard_after_forward": False,
        "ignore_router_for_ac": True,
        "wrap_outer_model": True,
        "lm_head_precision": None,
    }


def test_run_folders_of_one_second_differ_and_have_plain_names() -> None:
    folders = [compose_node("seed=1", with_hydra=True).hydra.run.dir for _ in range(3)]
    assert len(set(folders)) == 3
    for folder in folders:
        assert re.fullmatch(r"outputs/\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d-\d{6}", folder)
    sweep = compose_node("optimizer.lr=0.1", with_hydra=True).hydra.sweep
    assert re.fullmatch(r"multirun/[-\d]+/[-\d]+", sweep.dir)


def test_hydra_leaves_logging_and_the_working_directory_alone() -> None:
    from hydra.core.utils import configure_log

    hydra = compose_node(with_hydra=True).hydra
    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    configure_log(hydra.job_logging, hydra.verbose)
    configure_log(hydra.hydra_logging, hydra.verbose)
    assert (root.level, list(root.handlers)) == before
    assert hydra.job.chdir is False
    assert hydra.output_subdir == ".hydra"


def test_help_lists_every_group_with_its_choices_on_one_screen() -> None:
    text = help_text(CONF)
    for group, choices in group_choices(CONF).items():
        assert f"{group}: {', '.join(choices)}" in text
    assert len(text.splitlines()) <= 48
    assert "$" not in text
