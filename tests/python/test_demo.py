"""The demo: a short run on host memory succeeds and says what it did; a broken one is an error."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest
import torch

from tests.helpers import MIB, ROOT
from tests.python.test_command_line import cli, environment
from torch_vmm.demo import corpus, display, monitor
from torch_vmm.demo.monitor import Sample, Usage
from torch_vmm.demo.run import Outcome
from torch_vmm.demo.workload import LossCurve, Workload


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cli("demo", "--device", "cpu", "--plain", *arguments, fresh=True)


# -- Whole runs --------------------------------------------------------------------------------------------------------


def test_a_short_run_succeeds_and_its_numbers_fit_together() -> None:
    done = demo("--seconds", "8", "--least-steps")
    assert done.returncode == 0, done.stdout + done.stderr
    out = done.stdout

    def number(pattern: str) -> float:
        found = re.search(pattern, out, re.MULTILINE)
        assert found, f"{pattern} not in:\n{out}"
        return float(found.group(1))

    peaks = number(r"^sum of peaks +(\d+) MiB")
    limit = number(r"^limit +(\d+) MiB")
    assert limit < 0.7 * peaks
    assert number(r"^most mapped at once +(\d+) MiB") <= limit
    assert number(r"^handed over +(\d+) MiB") > 0
    assert number(r"^static partitions +would need (\d+) MiB") == peaks
    assert number(r"^writer: loss [\d.]+ -> ([\d.]+) ") < 0.75 * number(r"^writer: loss ([\d.]+) ")
    assert number(r"accuracy ([\d.]+)% on 359 digits") >= 90
    assert "0 changed answers" in out
    assert number(r"not seen; ([\d.]+)% before$") < 50
    before, after = out.index("before that it wrote:"), out.index("now it writes:")
    assert before < after < out.index("all models learned")
    assert out[before:after].splitlines()[1].strip()
    rows = re.findall(r"^ *\d+%  \w+ .{24}((?: +\d+){5}) +\d+$", out, re.MULTILINE)
    assert len(rows) >= 15
    for row in rows:
        *parts, mapped = (int(cell) for cell in row.split())
        assert sum(parts) == mapped
    assert max(len(line) for line in out.splitlines()) <= 80
    assert out.rstrip().endswith("all models learned, and the limit held")
    assert number(r"^time +([\d.]+) s") < 200


@pytest.fixture(scope="module")
def second() -> subprocess.CompletedProcess[str]:
    """A run of a second in which nobody learns."""
    return demo("--seconds", "1", "--learning-rate-scale", "0")


def test_a_run_that_learns_nothing_is_an_error(second: subprocess.CompletedProcess[str]) -> None:
    done = second
    assert done.returncode == 1
    assert "demo failed: writer: the loss went from" in done.stderr
    assert "demo failed: digits: the accuracy is" in done.stderr
    assert "demo failed: 1 s may be too short" in done.stderr
    assert "all models learned" not in done.stdout


def test_it_keeps_to_its_seconds(second: subprocess.CompletedProcess[str]) -> None:
    out = second.stdout
    (spent,) = re.findall(r"^worked +([\d.]+) s", out, re.MULTILINE)
    turns = re.findall(r"^ *\d+%  \w+ ", out, re.MULTILINE)
    # A step of each model at least; one takes well under a second on an idle machine.
    assert float(spent) < 1 + 6 * len(set(turns))
    assert len(turns) >= 3


def test_a_limit_that_is_too_small_is_an_error() -> None:
    done = demo("--seconds", "1", "--limit", "64MiB")
    assert done.returncode == 1
    assert "demo failed: out of memory: a limit of 64 MiB is too small" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--limit", "much"],
        ["--limit", "0"],
        ["--limit", "-1"],
        ["--limit", "1KiB"],
        ["--device", "tpu"],
        *(["--seconds", value] for value in ("0", "-3", "nan", "inf", "1e9", "soon", "")),
    ],
)
def test_arguments_that_cannot_be(arguments: list[str]) -> None:
    done = cli("demo", *arguments)
    assert done.returncode == 2
    assert f"argument {arguments[0]}: " in done.stderr
    assert "Traceback" not in done.stderr


def start_in_a_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command in a terminal of 80 columns, and where its output is read."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "torch_vmm", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment(), "TERM": "xterm", "COLUMNS": "80"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # A suite that runs in the background (nohup) may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    return process, ours


def read_until(ours: int, wanted: str, timeout_s: float) -> str:
    """What comes until ``wanted`` has come, or the process has ended."""
    text = b""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(OSError):  # nobody writes any more
        while wanted.encode() not in text and time.monotonic() < deadline:
            text += os.read(ours, 65536)
    return text.decode(errors="replace")


@pytest.mark.parametrize("when", ["measuring what each needs", "round 1 of 5"])
def test_ctrl_c_ends_it_cleanly(when: str) -> None:
    pytest.importorskip("rich")
    process, ours = start_in_a_terminal("demo", "--device", "cpu", "--seconds", "300")
    try:
        shown = read_until(ours, when, 200)
        assert when in shown, shown
        os.killpg(process.pid, signal.SIGINT)
        shown += read_until(ours, "interrupted", 60)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert "torch-vmm: interrupted" in shown
    assert "Traceback" not in shown
    if "\x1b[?25l" in shown:  # the cursor, hidden by the live table, is back
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_without_scikit_learn_it_says_what_to_install() -> None:
    hide = "import sys; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None\n"
    main = (
        "sys.argv[1:] = ['demo', '--device', 'cpu', '--plain']\nfrom torch_vmm.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", hide + main], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "pip install scikit-learn rich" in done.stderr


# -- Its parts ---------------------------------------------------------------------------------------------------------


def outcome(**changes: object) -> Outcome:
    good: dict[str, object] = {
        "peaks": {"one": 300, "other": 300},
        "limit": 400,
        "most_mapped": 400,
        "handed_over": 100,
        "exceeded_by": 0,
        "complaints": {},
    }
    return Outcome(**{**good, **changes})  # type: ignore[arg-type]


def test_a_good_outcome_has_no_failures() -> None:
    assert outcome().failures() == []


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"exceeded_by": 1}, "was exceeded by 1 bytes"),
        ({"handed_over": 0}, "no memory changed hands"),
        ({"complaints": {"one": "the accuracy is 10.0%"}}, "one: the accuracy is 10.0%"),
    ],
)
def test_each_failure_is_named(changes: dict[str, object], failure: str) -> None:
    failures = outcome(**changes).failures()
    assert len(failures) == 1
    assert failure in failures[0]


def test_nothing_needs_to_change_hands_under_a_large_limit() -> None:
    assert outcome(limit=600, handed_over=0).failures() == []


def test_handed_over_is_what_others_lost_and_the_taker_gained() -> None:
    before = {"one": 100, "two": 50, "three": 10}
    assert monitor.handed_over(before, {"one": 60, "two": 50, "three": 60}, "three") == 40
    assert monitor.handed_over(before, {"one": 60, "two": 50, "three": 20}, "three") == 10
    assert monitor.handed_over(before, {"one": 60, "two": 40, "three": 10}, "three") == 0
    assert monitor.handed_over(before, before, "one") == 0


def test_numbers_on_the_screen_add_up() -> None:
    for parts in ((0, 0, 0, 0), (1, 1, 1, 1), (MIB // 2,) * 4, (10 * MIB + 700_000, 900_000, 999_999, 1), (5, 0, 0, 0)):
        usage = Usage(*parts, mapped=sum(parts))
        *shown, mapped = usage.in_mib()
        assert sum(shown) == mapped
        assert abs(mapped - sum(parts) / MIB) <= 0.5
        assert all(abs(number - part / MIB) < 1 for number, part in zip(shown, parts, strict=True))


class Idle(Workload):
    """A model that does nothing, with a headline as long as they come."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(self, number: int) -> None: ...

    def headline(self) -> str:
        return "loss 2.24, 100% right"

    def report(self) -> list[str]:
        return []

    def complaint(self) -> str | None:
        return None


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_live_table_shows_its_bars_whole(columns: int) -> None:
    rich_console = pytest.importorskip("rich.console")
    names = ("writer", "digits", "encoder")
    usage = Usage(9000 * MIB, 4000 * MIB, 300 * MIB, 77 * MIB, 13_377 * MIB)
    sample = Sample(dict.fromkeys(names, usage), usage, 13_377 * MIB)  # full bars
    progress = display.Progress([Idle(name) for name in names], lambda: sample, "round 5 of 5", "digits", 1.0, 1.0)
    out = io.StringIO()
    console = rich_console.Console(file=out, width=columns, force_terminal=True, color_system=None)
    console.print(display.LiveDisplay(progress).draw(columns))
    lines = out.getvalue().splitlines()
    assert max(len(line) for line in lines) <= columns
    rows = [line for line in lines if line.split()[:1] and line.split()[0] in (*names, "all")]
    assert len(rows) == 4
    bars = {row.count("━") for row in rows}
    assert len(bars) == 1
    assert bars.pop() >= (13 if columns == 80 else 30)
    for row in rows:
        assert "…" not in row
        *parts, mapped = (int(number) for number in re.findall(r" (\d+)(?= )", row)[-5:])
        assert sum(parts) == mapped


@pytest.mark.parametrize(("end", "complains"), [(1.0, False), (2.4, True), (float("nan"), True)])
def test_a_loss_that_does_not_fall_is_complained_about(end: float, complains: bool) -> None:
    curve = LossCurve()
    for loss in [4.0, 2.0, *[end] * 8]:
        curve.add(torch.tensor(loss))
    assert (curve.complaint(most=0.75) is not None) == complains


def test_the_text_is_real_and_comes_back() -> None:
    numbers = corpus.load(200_000)
    assert numbers.dtype == torch.uint8
    assert int(numbers.max()) < corpus.VOCABULARY
    text = corpus.decode(numbers.tolist())
    assert "def " in text
    assert "import " in text
    assert corpus.decode(corpus.encode("def f():\n")) == "def f():\n"


@pytest.mark.parametrize(("size", "text"), [(0, "0 MiB"), (382 * MIB, "382 MiB"), (12_698 * MIB, "12.4 GiB")])
def test_sizes_as_text(size: int, text: str) -> None:
    assert display.size_text(size) == text
