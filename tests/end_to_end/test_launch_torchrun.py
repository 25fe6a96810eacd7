"""Under torchrun the ranks exist already: they join, and behave as one run."""

import os
import signal
import subprocess
import sys

import pytest
from launch_support import SCRIPT, environment, note, session_processes, torchrun, wait_for_notes, wait_until


def run_folders(folder):
    return [path.parent for path in folder.rglob(".hydra")]


@pytest.mark.parametrize("delays", ["0,1.5", "1.5,0"])
def test_one_folder_and_one_log_whenever_the_ranks_start(tmp_path, delays):
    finished = torchrun(tmp_path, "add_up", START_DELAYS=delays)
    assert finished.returncode == 0, finished.stderr
    (folder,) = run_folders(tmp_path)
    notes = [note(folder, rank) for rank in (0, 1)]
    assert [values["total"] for values in notes] == [3.0, 3.0]
    assert [values["run_dir"] for values in notes] == [str(folder)] * 2
    assert [values["context"]["kind"] for values in notes] == ["torchrun"] * 2
    assert len(list(tmp_path.rglob("train.log"))) == 1
    log = (folder / "train.log").read_text()
    assert "INFO the sum is 3.0" in log
    assert "INFO rank 1 the sum is 3.0" in log
    assert finished.stdout.count("the sum is 3.0") == 1


def test_a_failing_rank_tells_its_error_once_and_ends_the_others(tmp_path):
    finished = torchrun(tmp_path, "raise_on_one")
    assert finished.returncode == 1
    assert finished.stderr.count("the run failed: ") == 1
    assert "the run failed: rank 1 raised ValueError: bad luck in the last rank" in finished.stderr
    (folder,) = run_folders(tmp_path)
    assert "bad luck in the last rank" in (folder / "error.txt").read_text()
    # torchrun's own summary names the same cause.
    assert "ValueError: bad luck" in finished.stderr.split("Root Cause")[1]


def test_a_refusal_is_printed_by_rank_zero_alone(tmp_path):
    finished = torchrun(tmp_path, "add_up", MODEL_CHECK="refuse_model")
    assert finished.stderr.count("impossible request") == 1
    assert "exitcode  : 2 " in finished.stderr.split("Root Cause")[1]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_under_torchrun_is_refused(tmp_path):
    finished = torchrun(tmp_path, "add_up", "-m", "seed=1,2")
    assert finished.stderr.count("impossible request") == 1
    assert "--multirun" in finished.stderr
    assert list(tmp_path.iterdir()) == []


def start_ranks(folder, function, words=((), ()), **variables):
    """Two ranks by hand, as srun or another launcher would start them, without torchrun's agent."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "launch.device=cpu", f"hydra.run.dir={folder}/run", *words[rank]],
            env=environment(function, RANK=str(rank), LOCAL_RANK=str(rank), **place, **variables),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in (0, 1)
    ]


def test_without_an_agent_rank_zero_serves_the_store_and_waits_for_its_peers_to_hear_a_refusal(tmp_path):
    ranks = start_ranks(tmp_path, "add_up", MODEL_CHECK="refuse_model", START_DELAYS="0,1.5")
    errors = [process.communicate(timeout=60)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert "impossible request" in errors[0]
    assert errors[1] == ""


def test_ranks_started_with_different_words_are_refused(tmp_path):
    ranks = start_ranks(tmp_path, "add_up", words=(["seed=1"], ["seed=2"]))
    _, error = ranks[1].communicate(timeout=60)
    ranks[0].kill()
    ranks[0].communicate()
    assert ranks[1].returncode == 2
    assert "every rank must be started with the same words" in error


def test_sigterm_stops_joined_ranks_at_the_same_step_with_143(tmp_path):
    ranks = start_ranks(tmp_path, "work_until_killed")
    wait_for_notes(tmp_path / "run", 2)
    for process in ranks:
        os.kill(process.pid, signal.SIGTERM)
    errors = [process.communicate(timeout=30)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [143, 143], errors
    assert note(tmp_path / "run", 0)["stopped_at"] == note(tmp_path / "run", 1)["stopped_at"]


def test_sigint_ends_joined_ranks_with_130(tmp_path):
    ranks = start_ranks(tmp_path, "work_until_killed")
    wait_for_notes(tmp_path / "run", 2)
    for process in ranks:
        os.kill(process.pid, signal.SIGINT)
    errors = [process.communicate(timeout=30)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [130, 130]
    assert errors[0].strip() == "interrupted"
    assert wait_until(lambda: not any(session_processes(process.pid) for process in ranks), 5)
