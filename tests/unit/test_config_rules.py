"""Each rule of the settings: what breaks it is refused by key and told what is legal; its neighbour passes."""

from __future__ import annotations

import pytest
from composing import broken_rule, compose_config, refusal
from config_cases import LEGAL, MFSDP, PP2, REFUSED

from automodel.config import ConfigError, load
from automodel.config.availability import MISSING
from automodel.config.pipeline_rules import SCHEDULES, find_schedule
from automodel.config.validate import check_model_sizes, resolve_world_size


def _refusal(overrides: tuple[str, ...], world_size: int | None) -> ConfigError | None:
    try:
        return broken_rule(compose_config(*overrides), world_size)
    except ConfigError as error:
        return error


@pytest.mark.parametrize(
    ("overrides", "world_size", "key", "legal"), REFUSED, ids=[" ".join(case[0]) + f" -> {case[2]}" for case in REFUSED]
)
def test_refused(overrides: tuple[str, ...], world_size: int | None, key: str, legal: str) -> None:
    error = _refusal(overrides, world_size)
    assert error is not None
    assert error.key == key
    assert legal in error.legal
    assert error.rule
    assert len(str(error).splitlines()) <= 6


@pytest.mark.parametrize(
    ("overrides", "world_size", "ranks"), LEGAL, ids=[" ".join(case[0]) or f"{case[1]} ranks" for case in LEGAL]
)
def test_legal(overrides: tuple[str, ...], world_size: int | None, ranks: int) -> None:
    config = compose_config(*overrides)
    error = broken_rule(config, world_size)
    assert error is None, str(error)
    assert config.distributed.resolve(resolve_world_size(config, world_size, 0)).world_size == ranks


@pytest.mark.parametrize(
    "name",
    ["1F1B", "GPipe", "Interleaved1F1B", "interleaved1f1b", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
     "DualPipeV", "dfs", *SCHEDULES],
)  # fmt: skip
def test_schedules_go_by_their_own_names_and_by_torchs(name: str) -> None:
    assert find_schedule(name).name in SCHEDULES


def test_dfs_is_the_depth_first_interleaved_order() -> None:
    assert find_schedule("dfs") is find_schedule("interleaved_1f1b")


@pytest.mark.parametrize(
    ("schedule", "pp_size", "legal"),
    [
        ("1f1b", 4, {4, 5, 6, 8, 9}),
        ("gpipe", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("looped_bfs", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("v_schedule", 4, {1, 2, 3, 4, 5, 6, 7, 8, 9}),
        ("interleaved_1f1b", 4, {1, 2, 3, 4, 5, 6, 7, 8}),
        ("zero_bubble", 2, {1, 2, 3, 4, 6, 8}),
        ("dualpipe_v", 4, {8, 9}),
    ],
)
def test_micro_batches_that_a_schedule_takes(schedule: str, pp_size: int, legal: set[int]) -> None:
    counts = set(range(1, 10))
    taken = {count for count in counts if find_schedule(schedule).needs_microbatches(count, pp_size) is None}
    assert taken == (legal if schedule != "1f1b" else {count for count in counts if count >= pp_size})


def test_tensor_parallel_across_nodes_must_be_asked_for() -> None:
    config = compose_config("distributed.tp_size=8")
    error = broken_rule(config, 8, local_world_size=4)
    assert error is not None
    assert error.key == "distributed.tp_size"
    assert error.legal == "1, 2, 4, or launch.allow_tp_across_nodes=true"
    assert broken_rule(config, 8, local_world_size=8) is None
    asked = compose_config("distributed.tp_size=8", "launch.allow_tp_across_nodes=true")
    assert broken_rule(asked, 8, local_world_size=4) is None


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_without_its_package_is_refused_with_the_way_to_install_it(package: str) -> None:
    import importlib.util

    error = refusal(compose_config(f"logger={package}"))
    if importlib.util.find_spec(package) is not None:
        assert error is None
        return
    assert error is not None
    assert (error.key, error.value) == ("logger", package)
    assert f"pip install -e '.[{package}]'" in error.legal


@pytest.mark.parametrize(
    ("overrides", "context", "gpus", "world_size"),
    [
        ((), None, 0, 1),
        ((), None, 8, 8),
        ((), 4, 8, 4),
        (("launch.device=cpu",), None, 8, 1),
        (("launch.device=cpu", "distributed.dp_size=2"), None, 8, 2),
        (("launch.nproc_per_node=2",), None, 8, 2),
        (("launch.nproc_per_node=3",), 6, 0, 6),
        (("launch.device=cuda",), None, 2, 2),
        (("distributed=fsdp2_tp8_pp4",), None, 0, 32),
        (("distributed.ep_size=4", "distributed.cp_size=2"), None, 0, 4),
        (("distributed.ep_size=3", "distributed.dp_replicate_size=2"), None, 0, 6),
    ],
)
def test_the_world_is_what_the_launcher_started_else_all_gpus_else_the_smallest_legal(
    overrides: tuple[str, ...], context: int | None, gpus: int, world_size: int
) -> None:
    assert resolve_world_size(compose_config(*overrides), context, gpus) == world_size


@pytest.mark.parametrize(
    ("overrides", "context", "gpus", "key"),
    [
        (("launch.device=cuda",), None, 0, "launch.device"),
        (("launch.device=cuda",), 2, 0, "launch.device"),
        (("launch.nproc_per_node=4",), None, 2, "launch.nproc_per_node"),
    ],
)
def test_worlds_that_this_host_cannot_hold(
    overrides: tuple[str, ...], context: int | None, gpus: int, key: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_world_size(compose_config(*overrides), context, gpus)
    assert caught.value.key == key


def test_sizes_known_only_from_the_models_class_meet_the_same_rules() -> None:
    config = load({"model": {"pretrained_model_name_or_path": "m"}, "distributed": {"tp_size": 4}})
    check_model_sizes(config, {"num_attention_heads": 8, "vocab_size": 67, "max_position_embeddings": None}, 4)
    # Some families give a number for each layer: not for these rules.
    check_model_sizes(config, {"num_attention_heads": [6, 6]}, 4)
    with pytest.raises(ConfigError, match="attention heads"):
        check_model_sizes(config, {"num_attention_heads": 6}, 4)
    with pytest.raises(ConfigError, match="max_position_embeddings=128"):
        check_model_sizes(config, {"max_position_embeddings": 128}, 4)


def test_the_rule_for_vocabularies_knows_the_byte_tokenizer() -> None:
    from automodel.config.validate_layout import BYTE_VOCABULARY_SIZE
    from automodel.data import tokenizer

    assert BYTE_VOCABULARY_SIZE == tokenizer.BYTE_VOCABULARY_SIZE


def test_what_this_version_lacks_is_refused_by_name_and_after_every_other_rule() -> None:
    ways = {
        "distributed.tp_size": ("distributed.tp_size=2",),
        "distributed.pp_size": PP2,
        "distributed.cp_size": ("distributed.cp_size=2",),
        "distributed.ep_size": ("distributed.ep_size=2",),
        "distributed.strategy": MFSDP,
        "distributed.tp_plan": ("distributed.tp_plan={a:colwise}",),
        "distributed.enable_compile": ("distributed.tp_size=2", "distributed.enable_compile=true"),
        "training.loss": (*PP2, "training.loss=linear_cross_entropy"),
        "data.packed_sequence_size": ("data.packed_sequence_size=512",),
    }
    for item in MISSING:
        error = refusal(compose_config(*ways[item.key]))
        assert error is not None, item.key
        assert (error.key, error.legal) == (item.key, item.legal)
        assert "not supported by this version" in error.rule
        worse = refusal(compose_config(*ways[item.key], "optimizer.lr=-1"))
        assert worse is not None
        assert worse.key == "optimizer.lr"


def test_a_hugging_face_model_is_pretrained_unless_random_is_asked_for() -> None:
    named = ("model=hf", "model.pretrained_model_name_or_path=./m")
    for init in ("none", "pretrained"):
        assert compose_config(*named, f"model.init={init}").model.weights_source == "./m"
    assert compose_config(*named, "model.init=random").model.weights_source is None
