"""Which launcher started this process is read from the environment, and from nothing else."""

import subprocess
import sys

import pytest

from automodel.launch.context import FIRST_PORT, NUM_PORTS, LaunchContext, detect, expand_nodelist

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_RESTART_COUNT": "1",
}


def test_a_plain_process_is_single():
    assert detect({"PATH": "/bin", "HOME": "/root"}) == LaunchContext(kind="single")


def test_torchrun_says_where_this_rank_is():
    assert detect(TORCHRUN) == LaunchContext("torchrun", 5, 8, 1, 4, 1, 2, "10.0.0.1", 29500, "abc", 2)


def test_the_four_rendezvous_variables_alone_mean_torchrun():
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    context = detect(variables)
    assert (context.kind, context.rank, context.world_size) == ("torchrun", 1, 2)
    del variables["MASTER_PORT"]
    assert detect(variables).kind == "single"


def test_torchrun_inside_an_srun_step_is_torchrun():
    assert detect({**SRUN, **TORCHRUN}).kind == "torchrun"


def test_an_srun_task_knows_its_place_and_derives_the_same_port_as_its_peers():
    context = detect(SRUN)
    assert (context.kind, context.rank, context.world_size) == ("srun", 3, 4)
    assert (context.local_rank, context.local_world_size, context.node_rank, context.num_nodes) == (1, 2, 1, 2)
    assert (context.master_addr, context.job_id, context.restart) == ("node1", "77", 1)
    assert FIRST_PORT <= context.master_port < FIRST_PORT + NUM_PORTS
    peer = detect({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert peer.master_port == context.master_port
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "2"}).master_port != context.master_port


def test_a_batch_script_and_an_interactive_shell_are_not_ranks():
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert detect(batch).kind == "single"
    assert detect({**SRUN, "SLURM_PTY_PORT": "4000"}).kind == "single"


def test_submitit_on_slurm_and_on_this_host():
    assert detect({**SRUN, "SUBMITIT_EXECUTOR": "slurm"}).kind == "submitit_slurm"
    local = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "123",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
    }
    context = detect({**SRUN, **local})
    assert (context.kind, context.rank, context.world_size) == ("submitit_local", 1, 2)
    assert context.master_addr == "127.0.0.1"


@pytest.mark.parametrize(
    ("nodelist", "names"),
    [
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,12],login", ["n08", "n09", "n10", "n12", "login"]),
        ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
        ("a1,b[2]-gpu", ["a1", "b2-gpu"]),
    ],
)
def test_nodelists_expand_in_order(nodelist, names):
    assert expand_nodelist(nodelist) == names


def test_the_launcher_imports_neither_torch_nor_transformers():
    code = (
        "import sys, automodel.cli, automodel.launch.local, automodel.launch.preflight, automodel.launch.joined\n"
        "import automodel.launch.task, automodel.data.checks\n"
        "print(sorted({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
