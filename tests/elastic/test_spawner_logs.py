"""What workers write: kept in a file each, and passed on in whole lines."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from bamboo_ds.elastic.worker_logs import WorkerLogs
from bamboo_ds.errors import ConfigError
from tests.elastic.clusters import eventually


class Writers:
    """The ends of the descriptors of workers."""

    def __init__(self, logs: WorkerLogs, workers: int) -> None:
        self.logs, self.ends = logs, [logs.open(worker) for worker in range(workers)]

    def write(self, worker: int, text: str, *, stderr: bool = False) -> None:
        os.write(self.ends[worker][stderr], text.encode())

    def end(self) -> None:
        for out, err in self.ends:
            os.close(out)
            os.close(err)
        self.logs.close(wait_seconds=5)


@pytest.fixture
def writers(tmp_path: Path) -> Writers:
    return Writers(WorkerLogs(tmp_path / "logs", echo=True), 2)


def test_whole_lines_are_passed_on_and_everything_is_kept(
    writers: Writers, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    first, second = "one two", "eins zwei"
    for part in range(0, 9, 3):
        writers.write(0, first[part : part + 3])
        writers.write(1, second[part : part + 3])
    writers.write(0, "\n")
    writers.write(1, "\nno end of line")
    writers.write(0, "trouble\n", stderr=True)
    writers.end()
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["eins zwei", "no end of line", "one two"]
    assert shown.err == "trouble\n"
    assert sorted((tmp_path / "logs/worker-0.log").read_text().splitlines()) == ["one two", "trouble"]
    assert (tmp_path / "logs/worker-1.log").read_text() == "eins zwei\nno end of line"


def test_a_long_line_does_not_wait_for_its_end(writers: Writers, capfd: pytest.CaptureFixture[str]) -> None:
    text = "x" * 300_000
    writer = threading.Thread(target=lambda: [writers.write(0, text[:50_000]) for _ in range(6)])
    writer.start()
    # Captured output is in a file. `capfd` would lose what is written between its look and its emptying of it.
    eventually(lambda: os.fstat(1).st_size > 100_000, within_seconds=5, what="the first part is passed on")
    writer.join()
    writers.end()
    assert len(capfd.readouterr().out) == len(text)


def test_the_tail_says_nothing_of_a_former_run_whose_log_stays(tmp_path: Path) -> None:
    """Its traceback would be taken for the cause of this run's failure."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/worker-0.log").write_text("of a former run\n")
    writers = Writers(WorkerLogs(tmp_path / "logs", echo=False), 1)
    writers.write(0, "of this run")
    writers.end()
    assert writers.logs.tail(0, wait_seconds=5) == "of this run"
    assert (tmp_path / "logs/worker-0.log").read_text() == "of a former run\nof this run"


def test_the_tail_waits_for_what_is_on_the_way(tmp_path: Path) -> None:
    writers = Writers(WorkerLogs(tmp_path, echo=False), 1)
    writers.write(0, "a" * 5000 + "\nlast words\n")
    later = threading.Timer(0.2, writers.end)
    later.start()
    tail = writers.logs.tail(0, wait_seconds=5)
    assert tail.endswith("a\nlast words")
    assert len(tail) == 4000 - 1  # the last end of line is not shown
    later.join()


def test_nothing_is_passed_on_without_echo(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    writers = Writers(WorkerLogs(tmp_path, echo=False), 1)
    writers.write(0, "a line\n")
    writers.end()
    assert capfd.readouterr() == ("", "")
    assert (tmp_path / "worker-0.log").read_text() == "a line\n"


def test_a_log_goes_on_in_the_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "worker-0.log").write_text("before\n")
    writers = Writers(WorkerLogs(tmp_path, echo=False), 1)
    writers.write(0, "after\n")
    writers.end()
    assert (tmp_path / "worker-0.log").read_text() == "before\nafter\n"


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make the log folder .*file/logs: Not a directory"):
        WorkerLogs(tmp_path / "file/logs", echo=False)


LOGGING = """
import os, sys
from pathlib import Path
from bamboo_ds.elastic.worker_logs import WorkerLogs
logs = WorkerLogs(Path(sys.argv[1]), echo=True)
out, err = logs.open(0)
{body}
os.close(out)
os.close(err)
logs.close(wait_seconds=5)
"""


def test_a_reader_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    body = "for _ in range(100): os.write(out, b'x' * 1000 + b'\\n')"
    process = subprocess.Popen(
        [sys.executable, "-c", LOGGING.format(body=body), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(20) == 0
    assert process.stderr.read() == b""
    process.stderr.close()
    assert len((tmp_path / "worker-0.log").read_text()) == 100 * 1001


def test_a_terminal_stays_one_for_the_workers(tmp_path: Path) -> None:
    body = "os.write(err, f'{os.isatty(out)} {os.isatty(err)} {os.get_terminal_size(err).columns}'.encode())"
    ours, theirs = pty.openpty()
    os.set_inheritable(theirs, True)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 123, 0, 0))
    code = LOGGING.format(body=body)
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], stderr=theirs, check=True, timeout=20)
    os.close(theirs)
    assert os.read(ours, 1000).decode() == "False True 123"  # a partial line is passed on, too
    os.close(ours)
    assert (tmp_path / "worker-0.log").read_text() == "False True 123"
