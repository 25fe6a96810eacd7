"""A rank that fails ends the run at once, with its own error, once, and nothing is left running."""

import os
import signal
import time

import pytest
from launch_support import note, session_processes, start, train, wait_for_notes, wait_until

THREE_RANKS = "training.global_batch_size=12"


def ends(session, within=2):
    """No process of the launcher's session runs any more: neither it, nor the fork server, nor a rank."""
    return wait_until(lambda: session_processes(session) == [], within)


def test_a_rank_that_raises_ends_the_run_with_its_error_once(tmp_path):
    process = start(tmp_path, "raise_on_one", THREE_RANKS, ranks=3)
    wait_for_notes(tmp_path / "run", 3)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begun < 5
    assert process.returncode == 1
    assert errors.startswith("the run failed: rank 2 raised ValueError: bad luck in the last rank\n\nTraceback")
    assert errors.count("ValueError: bad luck in the last rank") == 2  # headline and traceback
    assert errors.count("Traceback") == 1
    for rank in (0, 1):
        assert f"  rank {rank}: " in errors
    assert errors.count("called from ") == 2
    assert ends(process.pid)
    text = (tmp_path / "run" / "error.txt").read_text()
    assert text.startswith(errors.rstrip())
    assert "bad luck in the last rank" in (tmp_path / "run" / "train.log").read_text()


def test_a_killed_rank_is_named_and_its_peers_are_not_blamed(tmp_path):
    process = start(tmp_path, "work_until_killed")
    pids = [values["pid"] for values in wait_for_notes(tmp_path / "run", 2)]
    os.kill(pids[1], signal.SIGKILL)
    begun = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begun < 5
    assert process.returncode == 1
    assert errors.startswith("the run failed: rank 1 was killed by SIGKILL")
    assert "Traceback" not in errors
    assert ends(process.pid)


def test_a_rank_that_exits_early_is_a_failure_and_its_last_words_are_shown(tmp_path):
    finished = train(tmp_path, "exit_on_one")
    assert finished.returncode == 1
    assert finished.stderr.startswith("the run failed: rank 1 exited with code 0 before the run had ended")
    assert "last words of rank 1" in finished.stderr


def test_a_stopped_rank_does_not_hinder_the_end(tmp_path):
    """A rank in a state where it answers nothing, as in a GPU driver, is killed like the others."""
    process = start(tmp_path, "work_until_killed", THREE_RANKS, ranks=3)
    pids = [values["pid"] for values in wait_for_notes(tmp_path / "run", 3)]
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[2], signal.SIGKILL)
    _, errors = process.communicate(timeout=15)
    assert errors.startswith("the run failed: rank 2 was killed by SIGKILL")
    assert "rank 0: gave no answer" in errors
    assert ends(process.pid)


def test_when_every_rank_times_out_all_places_are_shown(tmp_path):
    finished = train(tmp_path, "hang_apart", "launch.timeout_minutes=0.03")
    assert finished.returncode == 1
    assert "a collective did not end in time" in finished.stderr
    assert "called from wait_in_first (launch_ranks.py:" in finished.stderr
    assert "called from wait_in_second (launch_ranks.py:" in finished.stderr


def test_a_request_refused_late_still_looks_like_a_refusal(tmp_path):
    finished = train(tmp_path, "refuse_late")
    assert finished.returncode == 2
    assert "  rule   line 3 has no field text" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_ctrl_c_ends_all_ranks_with_130(tmp_path):
    process = start(tmp_path, "work_until_killed")
    wait_for_notes(tmp_path / "run", 2)
    # A terminal sends the signal to every process of the foreground group.
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
    assert ends(process.pid)


def test_ctrl_c_while_starting_is_as_quiet(tmp_path):
    process = start(tmp_path, "work_until_killed")
    # The launcher, multiprocessing's resource tracker, and the fork server: now importing torch.
    assert wait_until(lambda: len(session_processes(process.pid)) >= 3, 20)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
    assert ends(process.pid, within=10)


def test_sigterm_while_starting_leaves_nothing(tmp_path):
    process = start(tmp_path, "work_until_killed")
    assert wait_until(lambda: len(session_processes(process.pid)) >= 3, 20)
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (143, "")
    assert ends(process.pid, within=10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("whole_group", [False, True])
def test_sigterm_stops_all_ranks_at_the_same_step_with_143(tmp_path, whole_group):
    process = start(tmp_path, "work_until_killed")
    wait_for_notes(tmp_path / "run", 2)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (143, "")
    steps = [note(tmp_path / "run", rank)["stopped_at"] for rank in (0, 1)]
    assert steps[0] == steps[1]
    assert ends(process.pid)


def test_a_second_sigterm_ends_ranks_that_do_not_stop(tmp_path):
    process = start(tmp_path, "ignore_stop")
    wait_for_notes(tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert ends(process.pid)


@pytest.mark.parametrize("function", ["work_until_killed", "ignore_stop"])
def test_nothing_survives_the_launcher(tmp_path, function):
    process = start(tmp_path, function)
    wait_for_notes(tmp_path / "run", 2)
    assert len(session_processes(process.pid)) >= 4  # launcher, fork server, two ranks
    process.kill()
    process.communicate(timeout=10)
    assert ends(process.pid, within=5)
