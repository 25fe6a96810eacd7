"""All ranks write one log, whole lines each."""

import logging
import multiprocessing
import re
import warnings

import pytest

from automodel.launch.logs import append_text, configure_logging


@pytest.fixture(autouse=True)
def _restore_logging():
    root = logging.getLogger()
    saved = list(root.handlers), root.level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = saved
    logging.captureWarnings(False)


def write_many(folder, rank):
    configure_logging(folder, rank, console=False)
    for i in range(200):
        logging.getLogger("automodel.test").info("line %d of %d %s", i, rank, "x" * 300)


def test_lines_of_several_processes_do_not_mix(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(tmp_path, rank)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert len(lines) == 600
    assert all(re.fullmatch(r"\S+ \S+ INFO( rank [12])? line \d+ of [012] x{300}", line) for line in lines)


def test_rank_zero_also_speaks_on_the_console_in_plain_words(tmp_path, capsys):
    configure_logging(tmp_path, 0, console=True)
    logging.getLogger("automodel.training").info("step 1")
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("some.library").warning("trouble")
    assert capsys.readouterr().out == "step 1\ntrouble\n"
    assert "chatter" not in (tmp_path / "train.log").read_text()


def test_python_warnings_reach_the_log(tmp_path):
    configure_logging(tmp_path, 1, console=False)
    warnings.warn("something odd", stacklevel=1)
    assert "WARNING rank 1" in (tmp_path / "train.log").read_text()
    assert "something odd" in (tmp_path / "train.log").read_text()


def test_text_can_be_appended_without_a_logger(tmp_path):
    append_text(tmp_path, "first")
    append_text(tmp_path, "second\n")
    assert (tmp_path / "train.log").read_text() == "first\nsecond\n"
