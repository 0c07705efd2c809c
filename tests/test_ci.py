"""The checks check: .ci/report.py and .ci/run are fed runs that must come out red, and some that must not."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest

ROOT = Path(__file__).resolve().parent.parent
PASS = ("tests/test_a.py", "test_ok", "")
FAIL = ("tests/test_a.py", "test_bad", '<failure message="assert 1 == 2">trace</failure>')
ERROR = ("tests/test_a.py", "test_setup", '<error message="fixture broke">trace</error>')
XFAIL = ("tests/test_a.py", "test_later", '<skipped type="pytest.xfail" message="known"/>')


def skip(reason: str, name: str = "test_gpu[a-b]") -> tuple[str, str, str]:
    return (
        "tests/kernels/test_b.py",
        name,
        f'<skipped type="pytest.skip" message={quoteattr(reason)}>where</skipped>',
    )


def junit(*cases: tuple[str, str, str]) -> str:
    lines = [
        f'<testcase classname="{file[:-3].replace("/", ".")}" name={quoteattr(name)} file="{file}" line="3">{body}</testcase>'
        for file, name, body in cases
    ]
    return (
        f'<?xml version="1.0"?><testsuites><testsuite name="pytest">{"".join(lines)}</testsuite></testsuites>'
    )


class Run:
    """A finished run of suites, to be reported on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.allowed = ""

    def suite(self, name: str, *cases: tuple[str, str, str], status: int = 0) -> Run:
        results = self.folder / f"{name}.xml"
        results.write_text(junit(*cases))
        return self.line(name, str(status), str(results))

    def line(self, name: str, status: str, results: str) -> Run:
        self.lines.append(f"{name}\t12\t{status}\t{results}\n")
        return self

    def report(self) -> tuple[int, str]:
        (self.folder / "suites.tsv").write_text("".join(self.lines))
        (self.folder / "allowed.txt").write_text(self.allowed)
        command = [sys.executable, str(ROOT / ".ci/report.py"), "suites.tsv", "allowed.txt"]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def ci_run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_green(ci_run: Run) -> None:
    ci_run.allowed = "tests/* | needs a GPU*"
    status, text = ci_run.line("lint", "0", "-").suite("fast", PASS, PASS, skip("needs a GPU")).report()
    assert status == 0, text
    assert last_line(text) == "2 passed, 0 failed, 1 skipped"
    rows = [line.split() for line in text.splitlines()]
    assert ["fast", "12", "2", "1", "ok"] in rows
    assert ["lint", "12", "-", "-", "ok"] in rows
    assert ["fast", "1", "tests/kernels/test_b.py", "yes", "needs", "a", "GPU"] in rows


@pytest.mark.parametrize("case", [FAIL, ERROR], ids=["failure", "error"])
@pytest.mark.parametrize("status", [0, 1])
def test_a_failing_test_is_red_whatever_the_exit_status(
    case: tuple[str, str, str], status: int, ci_run: Run
) -> None:
    code, text = ci_run.suite("fast", PASS, case, status=status).suite("slow", PASS).report()
    assert code == 1
    assert f"failed: fast: tests/test_a.py::{case[1]}" in text
    assert last_line(text) == "2 passed, 1 failed, 0 skipped"


def test_an_exit_status_is_red_although_all_tests_passed(ci_run: Run) -> None:
    code, text = ci_run.suite("fast", PASS, status=3).report()
    assert code == 1
    assert "FAILED: exit 3" in text and last_line(text) == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("cases", [[], [skip("fine")]], ids=["no tests", "only skips"])
def test_a_suite_in_which_no_test_ran_is_red(cases: list[tuple[str, str, str]], ci_run: Run) -> None:
    ci_run.allowed = "* | fine"
    code, text = ci_run.suite("fast", PASS).suite("slow", *cases).report()
    assert code == 1
    assert "FAILED: no test ran" in text


@pytest.mark.parametrize(
    "content", [None, "", "<testsuites><testsuite>"], ids=["missing", "empty", "cut off"]
)
def test_a_suite_without_readable_results_is_red(content: str | None, ci_run: Run) -> None:
    path = ci_run.folder / "broken.xml"
    if content is not None:
        path.write_text(content)
    code, text = ci_run.suite("fast", PASS).line("slow", "137", str(path)).report()
    assert code == 1
    assert "exit 137 (over its time limit), no test results" in text


def test_a_failing_lint_is_red(ci_run: Run) -> None:
    code, text = ci_run.line("lint", "2", "-").suite("fast", PASS).report()
    assert code == 1 and "FAILED: exit 2" in text


def test_a_run_of_nothing_is_red(ci_run: Run) -> None:
    assert ci_run.line("lint", "0", "-").report()[0] == 1


@pytest.mark.parametrize(
    "allowed",
    ["", "tests/kernels/* | needs a TPU*", "tests/service/* | needs a GPU"],
    ids=["empty list", "other reason", "other test"],
)
def test_a_skip_that_is_not_listed_is_red(allowed: str, ci_run: Run) -> None:
    ci_run.allowed = allowed
    code, text = ci_run.suite("fast", PASS, skip("needs a GPU")).report()
    assert code == 1
    assert "tests/kernels/test_b.py::test_gpu[a-b]  NO" in text
    assert last_line(text) == "1 passed, 1 failed, 0 skipped"


def test_an_expected_failure_has_to_be_listed_too(ci_run: Run) -> None:
    assert ci_run.suite("fast", PASS, XFAIL).report()[0] == 1
    ci_run.allowed = "tests/test_a.py::test_later | xfail: known"
    assert ci_run.report()[0] == 0


@pytest.mark.parametrize("allowed, code", [("suite:rdna | no emulator", 0), ("tests/* | no emulator", 1)])
def test_a_suite_may_be_left_out_only_when_listed(allowed: str, code: int, ci_run: Run) -> None:
    ci_run.allowed = allowed
    assert ci_run.suite("fast", PASS).line("rdna", "0", "skip: no emulator").report()[0] == code


def test_unused_entries_are_shown_and_are_no_failure(ci_run: Run) -> None:
    ci_run.allowed = "# a comment\n\ntests/* | needs a TPU*\n"
    code, text = ci_run.suite("fast", PASS).report()
    assert code == 0
    assert "allowed skip that did not happen here: tests/* | needs a TPU*" in text


def test_a_malformed_entry_is_refused(ci_run: Run) -> None:
    ci_run.allowed = "tests/* needs a GPU"
    code, text = ci_run.suite("fast", PASS).report()
    assert code == 1 and "line 1: 'tests/* needs a GPU' is not of the form" in text


def test_reads_what_pytest_writes(ci_run: Run) -> None:
    """The ids and reasons of a real junit file: a class, parameters, a module skipped whole, an expected failure."""
    tests = ci_run.folder / "tests"
    tests.mkdir()
    (tests / "test_real.py").write_text(
        "import pytest\n"
        "class TestIt:\n"
        "    @pytest.mark.parametrize('x', ['a', 'b'])\n"
        "    def test_x(self, x):\n"
        "        if x == 'b': pytest.skip('because <b>')\n"
        "@pytest.mark.xfail(reason='known')\n"
        "def test_y(): assert 0\n"
        "def test_z(): assert 0\n"
    )
    (tests / "test_whole.py").write_text("import pytest\npytest.skip('not here', allow_module_level=True)\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--junitxml=real.xml",
        "-o",
        "junit_family=xunit1",
        "tests",
    ]
    done = subprocess.run(command, cwd=ci_run.folder, capture_output=True, check=False)
    _, text = ci_run.line("fast", str(done.returncode), "real.xml").report()
    for expected in (
        "tests/test_real.py::TestIt::test_x[b]  NO       because <b>",
        "tests/test_real.py::test_y             NO       xfail: known",
        "tests/test_whole.py                    NO       not here",
        "failed: fast: tests/test_real.py::test_z",
    ):
        assert expected in text
    assert last_line(text) == "1 passed, 4 failed, 0 skipped"


FAKE_MAKE = """#!/usr/bin/env bash
# make TARGET [PYTEST_ARGS=...]: leaves the results that the test prepared for TARGET.
echo "fake make $1 checkpoints=${NYBBLE_CHECKPOINTS:-unset}"
results=$(sed -n 's/.*--junitxml=\\([^ ]*\\).*/\\1/p' <<<"${2:-}")
[ -n "$results" ] && cp "$PREPARED/$1.xml" "$results"
[ -f "$PREPARED/$1.sleeps" ] && sleep 60
[ ! -f "$PREPARED/$1.fails" ]
"""


# make's targets that run tests, as .ci/run has them. Two, of checkpoints and of RDNA's emulator, run only where asked to.
SUITES = re.findall(r"^ *tests \S+ \d+ (\S+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE)
ALWAYS = len(SUITES) - 2


class Clone:
    """A folder with nothing but .ci in it, and a `make` and a package manager that only pretend."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a clone"
        self.prepared = folder / "prepared"
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        self.prepared.mkdir()
        make = folder / "bin/make"
        make.parent.mkdir()
        make.write_text(FAKE_MAKE)
        (make.parent / "dpkg").write_text('#!/bin/sh\n[ ! -e "$PREPARED/bare" ]\n')
        (make.parent / "apt-get").write_text('#!/bin/sh\necho "$@" >>"$PREPARED/apt"; [ "$5" != lld-22 ]\n')
        for command in make.parent.iterdir():
            command.chmod(0o755)
        for target in SUITES:
            (self.prepared / f"{target}.xml").write_text(junit(PASS))
        self.env = {k: v for k, v in os.environ.items() if k not in ("NYBBLE_CHECKPOINTS", "RDNA_TINYGRAD")}
        self.env |= {
            "PATH": f"{make.parent}:{os.environ['PATH']}",
            "PREPARED": str(self.prepared),
            "CI": "true",
        }

    def run(self, **env: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", ".ci/run"],
            cwd=self.root,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_run_is_green_and_says_what_it_left_out(clone: Clone) -> None:
    code, text = clone.run()
    assert code == 0, text
    assert last_line(text) == f"{ALWAYS} passed, 0 failed, 3 skipped"
    assert text.index("fake make test checkpoints=unset") < text.index("fake make test-wheel")


def test_run_installs_the_compilers_that_are_missing_and_goes_on_without(clone: Clone) -> None:
    (clone.prepared / "bare").touch()
    code, text = clone.run()
    assert code == 0, text
    asked = (clone.prepared / "apt").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == [
        "-qq",
        "clang-22",
        "lld-22",
        "libamdhip64-5",
        "prometheus",
        "nginx-light",
        "systemd",
        "podman",
        "runc",
        "mmdebstrap",
    ]
    assert "lld-22 could not be installed" in text and "clang-22 could not" not in text


def test_run_finds_checkpoints_beside_the_clone_for_their_suite_alone(clone: Clone) -> None:
    folder = clone.root.parent / "shared/checkpoints"
    folder.mkdir(parents=True)
    code, text = clone.run(RDNA_TINYGRAD="/x")
    assert code == 0, text
    assert f"fake make test-checkpoints checkpoints={folder}" in text
    assert "fake make test checkpoints=unset" in text and "fake make test-wheel checkpoints=unset" in text
    assert last_line(text) == f"{ALWAYS + 2} passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(
    "target", ["venv", "lint", "test", "test-slow", "test-soak", "test-packages", "test-wheel"]
)
def test_run_goes_on_after_a_red_suite_and_ends_red(target: str, clone: Clone) -> None:
    (clone.prepared / f"{target}.fails").touch()
    code, text = clone.run()
    assert code == 1
    assert "fake make test-wheel" in text
    assert last_line(text) == f"{ALWAYS} passed, 1 failed, 3 skipped"


def test_run_stops_a_suite_that_hangs(clone: Clone) -> None:
    (clone.prepared / "test-slow.sleeps").touch()
    code, text = clone.run(OVERALL_S="3")
    assert code == 1
    assert "FAILED: exit 124 (over its time limit)" in text


def test_run_does_not_count_the_results_of_an_earlier_run(clone: Clone) -> None:
    assert clone.run()[0] == 0
    (clone.prepared / "test.xml").unlink()
    code, text = clone.run()
    assert code == 1 and "no test results" in text


def test_the_list_of_allowed_skips_is_well_formed() -> None:
    spec = importlib.util.spec_from_file_location("ci_report", ROOT / ".ci/report.py")
    assert spec and spec.loader
    report = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = report
    spec.loader.exec_module(report)
    lines = (ROOT / ".ci/allowed_skips.txt").read_text(encoding="utf-8").splitlines()
    entries = report.read_allowed(lines)
    assert entries and len(set(entries)) == len(entries)
    assert not any(entry.covers(report.Skip("tests/test_a.py::test_b", "flaky")) for entry in entries)
