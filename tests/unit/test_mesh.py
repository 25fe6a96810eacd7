"""Meshes for every layout, on torch's fake process group: no process is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from automodel import MeshAxisName, MeshContext, ParallelismSizes, create_device_mesh, setup_distributed
from automodel.config.errors import ConfigError
from automodel.distributed.mesh import DEVICE_MESH_AXES


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def layouts(world_size: int) -> Iterator[dict[str, int]]:
    """Every (pp, dp_replicate, dp_shard, cp, tp) whose product is the world; HSDP needs dp_shard > 1."""
    for pp in divisors(world_size):
        for cp in divisors(world_size // pp):
            for tp in divisors(world_size // (pp * cp)):
                dp = world_size // (pp * cp * tp)
                for replicate in divisors(dp):
                    if replicate == 1 or replicate < dp:
                        yield {"pp_size": pp, "dp_replicate_size": replicate, "cp_size": cp, "tp_size": tp}


def expected_coordinate(rank: int, sizes: ParallelismSizes) -> dict[str, int]:
    """pp outermost, tp innermost."""
    found = {}
    for axis, size in (
        ("tp", sizes.tp_size),
        ("cp", sizes.cp_size),
        ("dp_shard", sizes.dp_shard_size),
        ("dp_replicate", sizes.dp_replicate_size),
        ("pp", sizes.pp_size),
    ):
        found[axis] = rank % size
        rank //= size
    return found


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_factorisation_gives_the_axes_in_order(world_size: int) -> None:
    for number, layout in enumerate(layouts(world_size)):
        rank = (number * 7) % world_size
        with fake_world(rank, world_size):
            context = setup_distributed({"strategy": "fsdp2", **layout}, device_type="cpu")
            sizes = context.sizes
            assert sizes.world_size == world_size
            want = expected_coordinate(rank, sizes)
            assert {str(axis): context.axis_rank(axis) for axis in DEVICE_MESH_AXES} == want
            assert context.axis_rank(MeshAxisName.DP) == want["dp_replicate"] * sizes.dp_shard_size + want["dp_shard"]
            assert context.axis_rank(MeshAxisName.DP_SHARD_CP) == want["dp_shard"] * sizes.cp_size + want["cp"]
            if world_size == 1:
                assert context.device_mesh is None
            else:
                assert context.device_mesh is not None
                assert context.device_mesh.mesh_dim_names == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
                assert context.mesh(MeshAxisName.DP).size() == sizes.dp_size
                assert context.mesh(MeshAxisName.DP_CP).size() == sizes.dp_size * sizes.cp_size


@pytest.mark.parametrize("world_size", [2, 8, 24, 64])
def test_expert_mesh_is_made_from_the_same_ranks(world_size: int) -> None:
    for layout in layouts(world_size):
        per_stage = world_size // layout["pp_size"]
        data_ranks = per_stage // layout["tp_size"]
        for ep in divisors(data_ranks)[1:]:
            with fake_world(world_size - 1, world_size):
                context = setup_distributed({**layout, "ep_size": ep}, device_type="cpu")
                assert context.moe_mesh is not None
                assert context.moe_mesh.mesh_dim_names == ("pp", "ep_shard", "ep")
                assert tuple(context.moe_mesh.shape) == (layout["pp_size"], per_stage // ep, ep)
                assert context.axis_rank(MeshAxisName.EP) == (world_size - 1) % ep


def test_one_process_needs_no_mesh_and_no_section() -> None:
    context = setup_distributed(None, world_size=1, device_type="cpu")
    assert context == MeshContext()
    assert [context.axis_rank(axis) for axis in DEVICE_MESH_AXES] == [0] * 5
    assert context.group(MeshAxisName.TP) is None
    with pytest.raises(RuntimeError, match="no device mesh"):
        context.mesh(MeshAxisName.TP)


def test_hybrid_sharding_slices_replicate_and_flattened_shard() -> None:
    with fake_world(0, 16):
        context = setup_distributed({"dp_replicate_size": 2, "cp_size": 2, "tp_size": 2}, device_type="cpu")
        mesh = context.mesh(MeshAxisName.DP_REPLICATE, MeshAxisName.DP_SHARD_CP)
        assert mesh.mesh_dim_names == ("dp_replicate", "dp_shard_cp")
        assert tuple(mesh.shape) == (2, 4)


def test_sizes_that_are_not_the_world_are_refused() -> None:
    with fake_world(0, 4), pytest.raises(ConfigError) as error:
        setup_distributed({"dp_size": 3}, device_type="cpu")
    assert error.value.key == "distributed.dp_size"
    with fake_world(0, 4), pytest.raises(ValueError, match="8 ranks and the world 4"):
        create_device_mesh(ParallelismSizes(dp_size=8), "cpu")


def test_an_omegaconf_section_is_taken_as_it_is() -> None:
    from omegaconf import OmegaConf

    section = OmegaConf.create(
        {
            "strategy": "fsdp2",
            "dp_size": "none",
            "tp_size": 2,
            "pipeline": {"pp_schedule": "gpipe", "pp_microbatch_size": 2},
            "moe": {"lm_head_precision": None},
        }
    )
    with fake_world(3, 4):
        context = setup_distributed(section, device_type="cpu")
    assert (context.dp_size, context.tp_size) == (2, 2)
    assert context.pipeline_config.pp_schedule == "gpipe"
