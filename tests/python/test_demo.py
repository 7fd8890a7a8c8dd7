"""The demo: a short run on host memory succeeds and says what it did; a broken one is an error."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.helpers import MIB, ROOT
from torch_vmm.demo import corpus, display, monitor
from torch_vmm.demo.run import Outcome
from torch_vmm.demo.workload import LossCurve


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The demo's models need more than the small host "device" of other tests.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_VMM_")}
    command = [sys.executable, "-m", "torch_vmm", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return cli("demo", "--device", "cpu", "--plain", *arguments)


# -- Whole runs --------------------------------------------------------------------------------------------------------


def test_a_short_run_succeeds_and_its_numbers_fit_together() -> None:
    done = demo("--seconds", "8")
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
    assert "def " in out
    assert out.rstrip().endswith("all models learned, and the limit held")
    assert number(r"^time +([\d.]+) s") < 200


def test_a_run_that_learns_nothing_is_an_error() -> None:
    done = demo("--seconds", "1", "--learning-rate-scale", "0")
    assert done.returncode == 1
    assert "demo failed: writer: the loss went from" in done.stderr
    assert "demo failed: digits: the accuracy is" in done.stderr
    assert "all models learned" not in done.stdout


def test_a_limit_that_is_too_small_is_an_error() -> None:
    done = demo("--seconds", "1", "--limit", "64MiB")
    assert done.returncode == 1
    assert "demo failed: out of memory: a limit of 64 MiB is too small" in done.stderr


@pytest.mark.parametrize("arguments", [["demo", "--limit", "much"], ["demo", "--device", "tpu"], ["dance"], []])
def test_arguments_that_cannot_be(arguments: list[str]) -> None:
    done = cli(*arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_without_scikit_learn_it_says_what_to_install() -> None:
    hide = "import sys; sys.modules['sklearn'] = sys.modules['sklearn.datasets'] = None\n"
    main = (
        "sys.argv[1:] = ['demo', '--device', 'cpu', '--plain']\nfrom torch_vmm.__main__ import main\nsys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", hide + main], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    assert "pip install scikit-learn rich" in done.stderr


def test_info_names_devices_and_options() -> None:
    done = cli("info")
    assert done.returncode == 0, done.stderr
    assert "cpu:0" in done.stdout
    assert "granularity 2 MiB" in done.stdout
    assert "TORCH_VMM_SCRUB" in done.stdout


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
