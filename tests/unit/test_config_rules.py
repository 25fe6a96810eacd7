"""Each rule of the settings: what breaks it is refused by key and told what is legal; its neighbour passes."""

from __future__ import annotations

import pytest
from composing import broken_rule, compose_config, refusal

from automodel.config import ConfigError, load
from automodel.config.availability import MISSING
from automodel.config.pipeline_rules import SCHEDULES, find_schedule
from automodel.config.validate import check_model_sizes, resolve_world_size

PP2 = ("distributed=fsdp2_pp2",)
PP4 = ("distributed=fsdp2_pp2", "distributed.pp_size=4")
MFSDP = ("distributed=megatron_fsdp",)

# overrides, ranks (None: the smallest legal number), key of the refusal, a word of what is legal
REFUSED: list[tuple[tuple[str, ...], int | None, str, str]] = [
    # the strategies
    (("distributed.strategy=fsdp3",), None, "distributed.strategy", "fsdp2, megatron_fsdp, ddp"),
    (("distributed=ddp", "distributed.tp_size=2"), None, "distributed.tp_size", "distributed.strategy=fsdp2"),
    (("distributed=ddp", "distributed.pp_size=2"), None, "distributed.pp_size", "1"),
    (("distributed=ddp", "distributed.cp_size=2"), None, "distributed.cp_size", "1"),
    (("distributed=ddp", "distributed.ep_size=2"), None, "distributed.ep_size", "1"),
    (("distributed=ddp", "distributed.dp_replicate_size=2"), None, "distributed.dp_replicate_size", "1"),
    (("distributed=fsdp2_tp2", "distributed.strategy=ddp"), None, "distributed.tp_size", "1"),
    ((*MFSDP, "distributed.pp_size=2"), None, "distributed.pp_size", "distributed.strategy=fsdp2"),
    ((*MFSDP, "distributed.ep_size=2"), None, "distributed.ep_size", "1"),
    ((*MFSDP, "distributed.dp_replicate_size=2"), None, "distributed.dp_replicate_size", "1"),
    (
        (*MFSDP, "distributed.sequence_parallel=true"),
        None,
        "distributed.sequence_parallel",
        "distributed.strategy=fsdp2",
    ),
    (
        ("distributed=ddp", "distributed.reshard_after_forward=false"),
        None,
        "distributed.reshard_after_forward",
        "fsdp2",
    ),
    (("distributed.bucket_cap_mb=50",), None, "distributed.bucket_cap_mb", "distributed.strategy=ddp"),
    (("distributed.zero_dp_strategy=2",), None, "distributed.zero_dp_strategy", "megatron_fsdp"),
    ((*MFSDP, "distributed.zero_dp_strategy=4"), None, "distributed.zero_dp_strategy", "0, 1, 2, 3"),
    (("distributed=ddp", "distributed.bucket_cap_mb=0"), None, "distributed.bucket_cap_mb", "positive"),
    (("distributed.forward_prefetch=-1",), None, "distributed.forward_prefetch", "0, 1, ..."),
    (("distributed.cp_method=ring",), None, "distributed.cp_method", "all_gather, ulysses"),
    (("distributed.activation_checkpointing=some",), None, "distributed.activation_checkpointing", "full, selective"),
    (("distributed.offload_policy=disk",), None, "distributed.offload_policy", "cpu"),
    # sizes against the world
    (("distributed.tp_size=0",), None, "distributed.tp_size", "1, 2, ..."),
    (("distributed.dp_size=-1",), None, "distributed.dp_size", "1, 2, ..."),
    (("distributed.tp_size=2.5",), None, "distributed.tp_size", "a whole number"),
    (("distributed.tp_size=2",), 3, "distributed", "multiple of 2"),
    (("distributed.dp_size=3",), 4, "distributed.dp_size", "4, none (inferred)"),
    (("distributed.dp_replicate_size=4",), 4, "distributed.dp_replicate_size", "1, 2"),
    (("distributed.dp_replicate_size=3",), 4, "distributed.dp_replicate_size", "1, 2"),
    (("distributed.dp_replicate_size=2",), 1, "distributed.dp_replicate_size", "1"),
    (("distributed.ep_size=3",), 4, "distributed.ep_size", "1, 2, 4"),
    # sizes against the model
    (("distributed.tp_size=3",), None, "distributed.tp_size", "1, 2, 4, 8"),
    (("distributed.tp_size=16",), None, "distributed.tp_size", "1, 2, 4, 8"),
    (("distributed.cp_size=3", "distributed.cp_method=ulysses"), None, "distributed.cp_size", "all_gather"),
    (
        ("distributed.tp_size=4", "distributed.cp_size=4", "distributed.cp_method=ulysses"),
        None,
        "distributed.cp_size",
        "1, 2, or",
    ),
    (("distributed.ep_size=4", "+model.config.num_experts=6"), 4, "distributed.ep_size", "1, 2"),
    (("distributed.ep_size=4", "model.config.n_routed_experts=6"), 4, "distributed.ep_size", "1, 2"),
    (
        ("distributed.ep_size=2", "distributed.tp_size=2"),
        4,
        "distributed.sequence_parallel",
        "true",
    ),
    (("model.config.vocab_size=200",), None, "model.config.vocab_size", "259"),
    (("model.config.num_hidden_layers=none_of_them",), None, "model.config.num_hidden_layers", "a whole number"),
    (("model.config.num_attention_heads=0",), None, "model.config.num_attention_heads", "1, 2, ..."),
    (("training.seq_length=4096",), None, "training.seq_length", "at most 2048"),
    # the sequence
    (
        ("distributed.tp_size=8", "distributed.sequence_parallel=true", "training.seq_length=100"),
        None,
        "training.seq_length",
        "96, 104",
    ),
    (("distributed.cp_size=4", "training.seq_length=100"), None, "training.seq_length", "96, 104"),
    (
        (
            "distributed.cp_size=2",
            "distributed.tp_size=8",
            "distributed.sequence_parallel=true",
            "training.seq_length=24",
        ),
        None,
        "training.seq_length",
        "16, 32",
    ),
    (("training.seq_length=0",), None, "training.seq_length", "1, 2, ..."),
    # batches
    (("training.global_batch_size=0",), None, "training.global_batch_size", "1, 2, ..."),
    (("training.local_batch_size=0",), None, "training.local_batch_size", "1, 2, ..."),
    (("training.local_batch_size=3",), None, "training.global_batch_size", "6 or 9"),
    (("training.local_batch_size=3",), None, "training.global_batch_size", "training.local_batch_size=1, 2, 4, 8"),
    (("distributed.dp_size=3",), None, "training.global_batch_size", "6 or 12"),
    (("distributed.dp_size=8",), None, "training.global_batch_size", "training.local_batch_size=1"),
    (("training.global_batch_size=7.5",), None, "training.global_batch_size", "a whole number"),
    (
        ("distributed=ddp", "distributed.static_graph=true", "distributed.dp_size=2"),
        None,
        "distributed.static_graph",
        "training.local_batch_size=4",
    ),
    # the pipeline
    ((*PP2, "distributed.pipeline.pp_schedule=1f2b"), None, "distributed.pipeline.pp_schedule", "interleaved_1f1b"),
    ((*PP2, "distributed.pipeline.pp_microbatch_size=0"), None, "distributed.pipeline.pp_microbatch_size", "1, 2"),
    ((*PP2, "distributed.pipeline.pp_microbatch_size=3"), None, "training.local_batch_size", "none with this"),
    (
        (*PP2, "training.local_batch_size=2", "distributed.pipeline.pp_microbatch_size=4"),
        None,
        "training.local_batch_size",
        "8",
    ),
    ((*PP4, "training.local_batch_size=2"), None, "training.local_batch_size", "4, 8"),
    ((*PP4, "pipeline=dualpipe_v", "training.local_batch_size=4"), None, "training.local_batch_size", "8"),
    (
        (*PP4, "pipeline=interleaved_1f1b", "training.local_batch_size=9", "training.global_batch_size=18"),
        None,
        "training.local_batch_size",
        "1, 2, 3, 6",
    ),
    (
        (*PP4, "pipeline=zero_bubble", "training.local_batch_size=9", "training.global_batch_size=18"),
        None,
        "training.local_batch_size",
        "1, 2, 3, 6",
    ),
    ((*PP2, "model.config.num_hidden_layers=1"), None, "distributed.pp_size", "at most 1"),
    ((*PP4, "pipeline=looped_bfs", "model.config.num_hidden_layers=6"), None, "distributed.pp_size", "at most 3"),
    ((*PP2, "distributed.pipeline.layers_per_stage=2"), None, "distributed.pipeline.layers_per_stage", "2 stages"),
    ((*PP2, "distributed.pipeline.layers_per_stage=0"), None, "distributed.pipeline.layers_per_stage", "1, 2"),
    (
        (*PP4, "pipeline=looped_bfs", "distributed.pipeline.layers_per_stage=3"),
        None,
        "distributed.pipeline.layers_per_stage",
        "1, 2; or round_virtual_stages_to_pp_multiple=up",
    ),
    (
        (*PP2, "pipeline=v_schedule", "distributed.pipeline.layers_per_stage=1"),
        None,
        "distributed.pipeline.layers_per_stage",
        "4 stages",
    ),
    (
        (*PP2, "distributed.pipeline.module_fqns_per_model_part=[[a],[b],[c]]"),
        None,
        "distributed.pipeline.module_fqns_per_model_part",
        "2, 4, ... parts",
    ),
    (
        (
            *PP2,
            "distributed.pipeline.module_fqns_per_model_part=[[a],[b]]",
            "distributed.pipeline.layers_per_stage=4",
        ),
        None,
        "distributed.pipeline.layers_per_stage",
        "none",
    ),
    (
        (*PP2, "distributed.pipeline.round_virtual_stages_to_pp_multiple=sideways"),
        None,
        "distributed.pipeline.round_virtual_stages_to_pp_multiple",
        "up",
    ),
    (
        (*PP2, "distributed.pipeline.pp_schedule_csv=no/such/file.csv"),
        None,
        "distributed.pipeline.pp_schedule_csv",
        "CSV",
    ),
    (
        (*PP2, "pipeline=zero_bubble", "distributed.activation_checkpointing=selective"),
        None,
        "distributed.activation_checkpointing",
        "1f1b",
    ),
    # precision
    (("precision.param_dtype=float16",), None, "precision.param_dtype", "bfloat16, float32"),
    (("precision.reduce_dtype=float16",), None, "precision.reduce_dtype", "bfloat16, float32"),
    (("distributed.mp_policy.param_dtype=float16",), None, "distributed.mp_policy.param_dtype", "none"),
    (("precision.param_dtype=int8",), None, "precision.param_dtype", "float32, bfloat16"),
    # the model
    (("model=hf",), None, "model.pretrained_model_name_or_path", "model=tiny_llama"),
    (("model.pretrained_model_name_or_path=./m",), None, "model.model_type", "model=hf"),
    (("model.init=pretrained",), None, "model.init", "random"),
    # the loop
    (("training.max_steps=none",), None, "training.max_steps", "training.num_epochs"),
    (("training.max_steps=0",), None, "training.max_steps", "1, 2, ..., none"),
    (("training.num_epochs=0",), None, "training.num_epochs", "1, 2, ..., none"),
    (("training.log_every_steps=0",), None, "training.log_every_steps", "1, 2"),
    (("training.val_every_steps=0",), None, "training.val_every_steps", "none"),
    (("training.ckpt_every_steps=0",), None, "training.ckpt_every_steps", "none"),
    (("training.generate_tokens=-1",), None, "training.generate_tokens", "0, 1, ..."),
    (("training.max_grad_norm=0",), None, "training.max_grad_norm", "no clipping"),
    (("training.max_grad_norm=nan",), None, "training.max_grad_norm", "no clipping"),
    (("seed=-1",), None, "seed", "0 to"),
    (
        ("data=text", "data.files=a.txt", "data.val_fraction=0", "training.val_every_steps=5"),
        None,
        "training.val_every_steps",
        "data.val_files",
    ),
    (
        ("data=text", "data.files=a.txt", "data.val_fraction=0", "training.val_at_start=true"),
        None,
        "training.val_at_start",
        "data.val_files",
    ),
    # the optimizer and its schedule
    (("optimizer.lr=-1",), None, "optimizer.lr", "positive"),
    (("optimizer.lr=inf",), None, "optimizer.lr", "positive"),
    (("optimizer.lr=fast",), None, "optimizer.lr", "a number"),
    (("optimizer.weight_decay=-0.1",), None, "optimizer.weight_decay", "positive"),
    (("optimizer.betas=[0.9,1.0]",), None, "optimizer.betas[1]", "below 1.0"),
    (("optimizer.betas=[0.9]",), None, "optimizer.betas", "2 entries"),
    (("optimizer.betas=0.9",), None, "optimizer.betas", "a list"),
    (("optimizer.eps=0",), None, "optimizer.eps", "1e-8"),
    (("optimizer=sgd", "optimizer.momentum=1"), None, "optimizer.momentum", "below 1.0"),
    (("optimizer.momentum=0.9",), None, "optimizer.momentum", "optimizer=sgd"),
    (("optimizer=sgd", "optimizer.betas=[0.8,0.9]"), None, "optimizer.betas", "optimizer=adamw"),
    (("lr_scheduler.warmup_steps=-1",), None, "lr_scheduler.warmup_steps", "0, 1, ..."),
    (("lr_scheduler.min_lr_ratio=1.5",), None, "lr_scheduler.min_lr_ratio", "0.0 to 1.0"),
    (("lr_scheduler.decay_steps=10",), None, "lr_scheduler.decay_steps", "lr_scheduler=wsd"),
    (("lr_scheduler=wsd", "lr_scheduler.decay_steps=0"), None, "lr_scheduler.decay_steps", "1, 2"),
    (
        ("lr_scheduler=wsd", "lr_scheduler.decay_steps=90", "training.max_steps=100"),
        None,
        "lr_scheduler.decay_steps",
        "1 to 80",
    ),
    # launch
    (("launch.device=cuda",), None, "launch.device", "cpu"),
    (("launch.device=tpu",), None, "launch.device", "auto, cpu, cuda"),
    (("launch.nproc_per_node=0",), None, "launch.nproc_per_node", "auto"),
    (("launch.nproc_per_node=some",), None, "launch.nproc_per_node", "auto"),
    (("launch.nproc_per_node=3", "distributed.dp_size=2"), None, "distributed.dp_size", "3"),
    (("launch.timeout_minutes=0",), None, "launch.timeout_minutes", "positive"),
    # keys that nothing reads
    (("+training.max_step=3",), None, "training.max_step", "max_steps"),
    (("+speed=3",), None, "speed", "seed"),
    (("distributed.tp_sise=2",), None, "distributed.tp_sise", "tp_size"),
    (("distributed.pipeline.pp_schedul=gpipe",), None, "distributed.pipeline.pp_schedul", "pp_schedule"),
    (("distributed.moe.ignore_router=true",), None, "distributed.moe.ignore_router", "ignore_router_for_ac"),
    (("distributed.mp_policy.dtype=float32",), None, "distributed.mp_policy.dtype", "param_dtype"),
]


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


# overrides, ranks (None: the smallest legal number), the ranks that result
LEGAL: list[tuple[tuple[str, ...], int | None, int]] = [
    ((), 1, 1),
    ((), 4, 4),
    (("distributed.strategy=ddp",), None, 1),
    (("distributed.strategy=DDP", "distributed.static_graph=true", "training.local_batch_size=8"), None, 1),
    (("distributed=ddp", "distributed.bucket_cap_mb=50", "distributed.dp_size=2"), None, 2),
    (("distributed=ddp", "distributed.static_graph=true", "distributed.activation_checkpointing=true",
      "training.local_batch_size=8"), None, 1),
    (("distributed.strategy=megatron-fsdp", "distributed.zero_dp_strategy=2"), None, 1),
    (("distributed.strategy=mfsdp", "distributed.tp_size=2", "distributed.cp_size=2"), None, 4),
    (("distributed.dp_size=none", "distributed.activation_checkpointing=full"), None, 1),
    (("distributed.mp_policy={param_dtype:float32,reduce_dtype:float32,output_dtype:none}",), None, 1),
    (("distributed.offload_policy=cpu", "distributed.dp_size=2"), None, 2),
    (("distributed=hsdp",), None, 4),
    (("distributed=hsdp", "distributed.dp_replicate_size=4", "training.local_batch_size=1"), None, 8),
    (("distributed.dp_replicate_size=1",), None, 1),
    # uneven kv heads, vocabularies and layers are done right, not refused
    (("distributed.tp_size=8", "model.config.num_key_value_heads=1"), None, 8),
    (("distributed.tp_size=8", "model.config.vocab_size=261"), None, 8),
    ((*PP2, "model.config.num_hidden_layers=5"), None, 2),
    ((*PP4, "pipeline=looped_bfs", "distributed.pipeline.layers_per_stage=3",
      "distributed.pipeline.round_virtual_stages_to_pp_multiple=up", "model.config.num_hidden_layers=15"), None, 4),
    ((*PP2, "pipeline=looped_bfs", "distributed.pipeline.layers_per_stage=2",
      "distributed.pipeline.round_virtual_stages_to_pp_multiple=down", "model.config.num_hidden_layers=9"), None, 2),
    ((*PP2, "distributed.pipeline.module_fqns_per_model_part=[[a],[b]]"), None, 2),
    # sections of an axis of size 1 are idle, whatever they hold
    (("distributed.pipeline.pp_microbatch_size=3", "distributed.pipeline.layers_per_stage=5"), None, 1),
    (("pipeline=dualpipe_v", "distributed.sequence_parallel=true", "training.seq_length=99"), None, 1),
    (("distributed.moe.mp_policy.param_dtype=float16",), None, 1),
    # another strategy's fields at their defaults are dropped
    (("distributed=ddp", "distributed.tp_size=1", "distributed.defer_fsdp_grad_sync=true"), None, 1),
    (("~distributed", "~pipeline", "~moe"), None, 1),
    # every axis at once
    (("distributed=fsdp2_tp2_pp2", "distributed.cp_size=2", "distributed.sequence_parallel=true"), None, 8),
    (("distributed.tp_size=2", "distributed.ep_size=2", "distributed.sequence_parallel=true"), None, 4),
    (("distributed.ep_size=4", "model.config.num_local_experts=8", "distributed.cp_size=2"), None, 4),
    (("distributed.cp_size=4", "distributed.tp_size=2", "distributed.cp_method=ulysses"), None, 8),
    ((*PP4, "pipeline=zero_bubble", "distributed.activation_checkpointing=full"), None, 4),
    # a run may be shorter than its warm-up, and end by epochs
    (("training.max_steps=2",), None, 1),
    (("training.max_steps=none", "training.num_epochs=1"), None, 1),
    (("optimizer=sgd", "optimizer.momentum=0.9", "optimizer.lr=0"), None, 1),
    (("lr_scheduler=wsd", "lr_scheduler.decay_steps=80", "training.max_steps=100"), None, 1),
    (("training.max_grad_norm=none", "training.val_every_steps=none"), None, 1),
    (("data=text", "data.files=[a.txt,b.txt]", "data.val_fraction=0"), None, 1),
    (("data.tokenizer=some/tokenizer", "model.config.vocab_size=67"), None, 1),
    (("launch.nproc_per_node=2",), None, 2),
    (("model=hf", "model.pretrained_model_name_or_path=./m", "model.init=random"), None, 1),
]  # fmt: skip


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
        "distributed.enable_compile": ("distributed.enable_compile=true",),
        "distributed.activation_checkpointing": ("distributed.activation_checkpointing=selective",),
        "data.packed_sequence_size": ("data.packed_sequence_size=512",),
        "model.init": ("model=hf", "model.pretrained_model_name_or_path=./m"),
        "training.ckpt_every_steps": ("training.ckpt_every_steps=10",),
        "checkpoint.resume": ("checkpoint.resume=auto",),
        "checkpoint.keep_last": ("checkpoint.keep_last=2",),
        "checkpoint.keep_best": ("checkpoint.keep_best=1",),
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
        error = refusal(compose_config(*named, f"model.init={init}"))
        assert error is None or (error.key, error.legal) == ("model.init", "random")
    assert refusal(compose_config(*named, "model.init=random")) is None
