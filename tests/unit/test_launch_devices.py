"""GPUs are counted from files and variables, and the environment of ranks is built from the launcher's."""

import importlib.metadata
import os

import pytest

from automodel.config.errors import ConfigError
from automodel.launch.context import LaunchContext
from automodel.launch.devices import choose_device, count_gpus
from automodel.launch.local import num_threads, rank_environment


@pytest.fixture
def host_with_four_gpus(tmp_path, monkeypatch):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    return tmp_path


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("-1", 0), ("0,1", 2), ("3", 1), ("0,-1,2", 1), ("GPU-aa,GPU-bb", 2)]
)
def test_cuda_visible_devices_limits_the_gpus_of_the_host(host_with_four_gpus, visible, count):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, host_with_four_gpus) == count


def test_a_host_without_gpus_has_none_whatever_is_visible(tmp_path):
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == 0


def test_a_cpu_build_of_torch_sees_no_gpu(host_with_four_gpus, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert count_gpus({}, host_with_four_gpus) == 0


def test_the_device_is_cuda_where_there_is_a_gpu():
    assert choose_device("auto", 0) == "cpu"
    assert choose_device("auto", 1) == "cuda"
    assert choose_device("cpu", 8) == "cpu"
    with pytest.raises(ConfigError, match=r"launch\.device"):
        choose_device("cuda", 0)


def test_a_rank_gets_torchruns_variables_and_none_of_slurms():
    environ = {"HOME": "/root", "SLURM_PROCID": "0", "SUBMITIT_EXECUTOR": "local", "RANK": "9"}
    context = LaunchContext("local", 1, 4, 1, 4, master_port=4321)
    result = rank_environment(environ, context, "cpu")
    assert {k: result[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (result["MASTER_ADDR"], result["MASTER_PORT"], result["HOME"]) == ("127.0.0.1", "4321", "/root")
    assert not [name for name in result if name.startswith(("SLURM_", "SUBMITIT_"))]


def test_ranks_use_the_loopback_unless_the_user_chose():
    context = LaunchContext("local", 0, 2, 0, 2)
    assert rank_environment({}, context, "cpu")["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert rank_environment({"NCCL_SOCKET_IFNAME": "eth0"}, context, "cuda")["NCCL_SOCKET_IFNAME"] == "eth0"


def test_ranks_share_the_cores_unless_the_user_chose():
    cores = len(os.sched_getaffinity(0))
    assert num_threads({}, 1) == cores
    assert num_threads({}, 10 * cores) == 1
    assert num_threads({"OMP_NUM_THREADS": "3"}, 64) == 3
    assert rank_environment({}, LaunchContext("local", 0, cores, 0, cores), "cpu")["OMP_NUM_THREADS"] == "1"


def test_a_run_on_the_cpu_sees_no_gpu():
    context = LaunchContext("local", 0, 2, 0, 2)
    environ = {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert rank_environment(environ, context, "cpu")["CUDA_VISIBLE_DEVICES"] == ""
    assert rank_environment(environ, context, "cuda")["CUDA_VISIBLE_DEVICES"] == "2,3"
