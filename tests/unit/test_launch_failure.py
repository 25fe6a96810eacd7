"""Of several failures the cause is named, and a stack becomes one line that says where a rank was."""

import faulthandler
import pickle
import tempfile
import threading

import pytest

from automodel.config.errors import ConfigError
from automodel.launch.errors import RunFailed
from automodel.launch.failure import Failure, classify, compose_report, describe_exit, root_cause
from automodel.launch.stacks import describe_stack, main_thread_header, where

GLOO_CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32959."
GLOO_RESET = "[third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:46288: Connection reset by peer"
GLOO_TIMEOUT = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800ms for recv operation to complete"
NCCL_REMOTE = "NCCL error in: ProcessGroupNCCL.cpp:1, remote process exited or there was a network error"


def failure(rank, kind, time=0.0, message="", trace=""):
    return Failure(rank, kind, "RuntimeError", message, trace, time)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("connection closed by peer"), "error"),
        (RuntimeError(GLOO_CLOSED), "peer"),
        (RuntimeError(GLOO_RESET), "peer"),
        (RuntimeError(NCCL_REMOTE), "peer"),
        (ConnectionResetError("x"), "peer"),
        (RuntimeError(GLOO_TIMEOUT), "timeout"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (ConfigError("a", 1, "b", "c"), "config"),
        (SystemExit(3), "exit"),
    ],
)
def test_errors_are_told_apart(error, kind):
    assert classify(error) == kind


def test_a_wrapped_connection_error_is_still_a_peers():
    error = ValueError("step 3 failed")
    error.__cause__ = RuntimeError(GLOO_CLOSED)
    assert classify(error) == "peer"


def test_the_cause_is_the_first_failure_that_is_not_a_lost_connection():
    failures = [failure(0, "peer", 1.0), failure(1, "timeout", 2.0), failure(2, "error", 4.0), failure(3, "error", 3.0)]
    assert root_cause(failures).rank == 3
    assert root_cause(failures[:2]).rank == 1
    assert root_cause(failures[:1]).rank == 0


def test_an_abort_is_not_the_cause_where_something_else_happened():
    aborted = Failure.from_exit_code(0, -6)
    killed = Failure.from_exit_code(1, -9)
    assert root_cause([aborted, killed]).rank == 1
    assert root_cause([aborted, failure(1, "peer")]).rank == 0


def test_an_exit_says_how_the_process_ended():
    assert describe_exit(3) == "exited with code 3 before the run had ended"
    assert "SIGKILL" in describe_exit(-9)
    assert "memory" in describe_exit(-9)
    assert "SIGSEGV" in describe_exit(-11)


def test_the_report_has_the_cause_once_and_a_line_for_each_other_rank():
    root = failure(1, "error", 1.0, "bad luck", "Traceback: bad luck")
    trace = '  File "/x/torch/distributed_c10d.py", line 9, in all_reduce\nRuntimeError: closed'
    report, details = compose_report([failure(0, "peer", 2.0, GLOO_CLOSED, trace), root], {}, 3)
    assert report.startswith("the run failed: rank 1 raised RuntimeError: bad luck")
    assert report.count("Traceback: bad luck") == 1
    assert "rank 0: lost its connection in all_reduce (distributed_c10d.py:9)" in report
    assert "rank 2:" in report
    assert "closed" not in report
    assert "RuntimeError: closed" in details


def test_when_all_time_out_each_rank_says_where():
    def timed_out(rank, name):
        return failure(rank, "timeout", rank, GLOO_TIMEOUT, f'  File "/home/me/step.py", line {rank}, in {name}\n')

    report, _ = compose_report([timed_out(0, "forward"), timed_out(1, "clip")], {}, 2)
    assert "rank 0: timed out in forward (step.py:0)" in report
    assert "rank 1: timed out in clip (step.py:1)" in report


def test_a_real_dump_of_several_threads_yields_the_main_threads_place():
    release = threading.Event()
    helper = threading.Thread(target=release.wait)
    helper.start()
    with tempfile.TemporaryFile("w+") as file:
        file.write(main_thread_header())
        file.flush()

        def known_place():
            faulthandler.dump_traceback(file, all_threads=True)

        known_place()
        file.seek(0)
        dump = file.read()
    release.set()
    helper.join()
    # Tests that ran before may have left threads of their own.
    assert dump.count("most recent call first") >= 2
    assert "known_place" in describe_stack(dump).splitlines()[-1]
    assert where(dump).startswith("known_place (test_launch_failure.py:")


def test_a_place_inside_a_library_names_its_caller_too():
    trace = (
        '  File "/home/me/step.py", line 88, in train_step\n'
        '  File "/v/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper\n'
        '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce\n'
    )
    assert where(trace) == "all_reduce (distributed_c10d.py:3252), called from train_step (step.py:88)"
    assert where("") == "a place without Python code"


def test_a_traceback_begins_in_the_program():
    def in_the_program():
        raise ValueError("here")

    source = "def rank_main(function):\n    function()\n"
    scope = {}
    exec(compile(source, "/x/automodel/launch/rank.py", "exec"), scope)
    try:
        scope["rank_main"](in_the_program)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        text = Failure.from_exception(0, error).traceback
    assert "in_the_program" in text
    assert "rank_main" not in text


def test_a_failed_run_survives_pickling():
    error = pickle.loads(pickle.dumps(RunFailed("short", "long")))
    assert (error.report, error.details, str(error)) == ("short", "long", "short")
