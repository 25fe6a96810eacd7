"""Plain ``python train.py``: real processes, real collectives, and what is left of them."""

import json

import pytest
from launch_support import note, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of two ranks, looked at from many sides."""
    folder = tmp_path_factory.mktemp("local run")
    finished = train(folder, "add_up", "seed=7", SLURM_PROCID="0", SUBMITIT_EXECUTOR="x")
    assert finished.returncode == 0, finished.stderr
    return folder, finished


def test_ranks_meet_and_reduce(run):
    folder, _ = run
    assert [note(folder / "run", rank)["total"] for rank in (0, 1)] == [3.0, 3.0]


def test_each_rank_knows_its_place(run):
    folder, _ = run
    for rank in (0, 1):
        context = note(folder / "run", rank)["context"]
        assert (context["kind"], context["rank"], context["local_rank"]) == ("local", rank, rank)
        assert (context["world_size"], context["master_addr"]) == (2, "127.0.0.1")
        variables = note(folder / "run", rank)["environment"]
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == (str(rank), "2", str(rank))
        assert not [name for name in variables if name.startswith(("SLURM_", "SUBMITIT_", "AUTOMODEL_"))]
        assert note(folder / "run", rank)["threads"] == 1


def test_the_config_reaches_every_rank(run):
    folder, _ = run
    assert [note(folder / "run", rank)["seed"] for rank in (0, 1)] == [7, 7]


def test_there_is_one_folder_with_one_log(run):
    folder, _ = run
    assert sorted(path.name for path in folder.iterdir()) == ["run"]
    names = sorted(path.name for path in (folder / "run").iterdir())
    assert names == [".hydra", "rank_0.json", "rank_1.json", "train.log"]
    log = (folder / "run" / "train.log").read_text()
    assert log.count("INFO the sum is 3.0") == 1
    assert log.count("INFO rank 1 the sum is 3.0") == 1
    assert "WARNING rank 1 rank 1 has a warning" in log


def test_only_rank_zero_speaks_on_the_terminal(run):
    _, finished = run
    assert finished.stdout.splitlines() == ["the sum is 3.0", "rank 0 has a warning", "printed by rank 0"]
    assert finished.stderr == ""


def test_every_listening_socket_is_on_the_loopback(tmp_path):
    assert train(tmp_path, "sockets").returncode == 0
    notes = [note(tmp_path / "run", rank) for rank in (0, 1)]
    listening = [address for values in notes for address in values["listening"]]
    assert ["127.0.0.1", notes[0]["master_port"]] in listening
    assert {address for address, _ in listening} == {"127.0.0.1"}


def test_a_world_of_one_runs_alike_without_a_process_group(tmp_path):
    finished = train(tmp_path, "add_up", ranks=1)
    assert finished.returncode == 0, finished.stderr
    assert note(tmp_path / "run", 0)["total"] == 1.0


def test_a_refused_model_leaves_no_folder(tmp_path):
    finished = train(tmp_path, "add_up", MODEL_CHECK="refuse_model")
    assert finished.returncode == 2
    assert finished.stderr.splitlines()[1:3] == ["  key    model.config.hidden_size", "  value  7"]
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [("distributed.tp_size=3", "distributed"), ("optimzer=sgd", "optimzer"), ("--optimizer", "command line")],
)
def test_a_refused_setting_leaves_no_folder(tmp_path, override, key):
    finished = train(tmp_path, "add_up", override)
    assert finished.returncode == 2
    assert f"  key    {key}\n" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_broken_check_is_a_failure_not_a_refusal(tmp_path):
    finished = train(tmp_path, "add_up", MODEL_CHECK="break_model_check")
    assert finished.returncode == 1
    assert "ZeroDivisionError: the check itself is broken" in finished.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_and_config_are_printed_without_a_run(tmp_path):
    printed = train(tmp_path, "add_up", "--cfg", "job", "seed=3")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "seed: 3" in printed.stdout
    helped = train(tmp_path, "add_up", "--help")
    assert helped.returncode == 0
    assert "tiny_llama" in helped.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_goes_on_after_a_failed_job_and_ends_nonzero(tmp_path):
    finished = train(tmp_path, "fail_if_seed_is_one", "-m", "seed=0,1,2", f"hydra.sweep.dir={tmp_path}/sweep", ranks=1)
    assert finished.returncode == 1
    assert finished.stderr.count("Traceback") == 1
    assert f"job 1 ({tmp_path}/sweep/1): the run failed: rank 0 raised ValueError: seed one" in finished.stderr
    assert "1 of 3 jobs failed: 1" in finished.stderr
    assert (tmp_path / "sweep" / "1" / "error.txt").exists()
    assert "seed one is unlucky" in (tmp_path / "sweep" / "1" / "train.log").read_text()
    assert not (tmp_path / "sweep" / "0" / "error.txt").exists()
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == ["0", "1", "2"]


def test_a_sweep_of_impossible_jobs_is_refused(tmp_path):
    finished = train(tmp_path, "add_up", "-m", "distributed.tp_size=3,5", f"hydra.sweep.dir={tmp_path}/sweep")
    assert finished.returncode == 2
    assert finished.stderr.count("impossible request") == 2


def test_the_composed_config_is_saved_once(run):
    folder, _ = run
    assert sorted(path.name for path in (folder / "run" / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert json.dumps("seed=7") in json.dumps((folder / "run" / ".hydra" / "overrides.yaml").read_text().split())
