"""Reward functions: finding them, calling them in worker processes, and what becomes of the ones that fail."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import reasoning_gym
import torch

from tridentrl.rewards.functions import exact_match
from tridentrl.rewards.loading import custom_function
from tridentrl.rewards.pool import RewardError, RewardPool, RewardSample
from tridentrl.rewards.routing import RewardRouter
from tridentrl.rewards.verifiers import reasoning_gym as score_reasoning_gym
from tridentrl.rewards.worker import as_score

ONE_SOURCE = {"data.train_files": {"task": 8}}

# One worker pool serves most tests: the function does what the response tells it to.
BEHAVIOURS = """
import os, re, signal, time

def helper():
    raise KeyError("deep inside")

def compute_score(response, ground_truth=None):
    kind, _, rest = response.partition(" ")
    if kind == "score":
        return float(rest)
    if kind == "none":
        return None
    if kind == "list":
        return [1.0, 2.0]
    if kind == "text":
        return "1"
    if kind == "nan":
        return float("nan")
    if kind == "raise":
        helper()
    if kind == "exit":
        raise SystemExit(0)
    if kind == "interrupt":
        raise KeyboardInterrupt
    if kind == "die":
        os._exit(7)
    if kind == "loop":
        while True:
            pass
    if kind == "sleep":
        time.sleep(60)
    if kind == "regex":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if kind == "stuck":  # in C, deaf to signals
        return sum(range(10**11))
    if kind == "alarm":
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.alarm(1)
        return 1.0
    if kind == "swallow":
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            return 1.0
        except ValueError:
            return 0
    if kind == "pid":
        return os.getpid()
"""


def write(path: Path, source: str) -> str:
    path.write_text(textwrap.dedent(source))
    return str(path)


def sample(response: str, number: int = 0, **other: Any) -> RewardSample:
    values = {"prompt": "1+2=", "ground_truth": "3", "data_source": "task", "extra_info": None} | other
    return RewardSample(id=f"step 1 sample {number}", response=response, **values)


def batch(*responses: str) -> list[RewardSample]:
    return [sample(response, number) for number, response in enumerate(responses)]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> RewardRouter:
    path = write(tmp_path_factory.mktemp("reward") / "behaviours.py", BEHAVIOURS)
    return RewardRouter(data_sources=ONE_SOURCE, custom_path=path)


def make_pool(router: RewardRouter, **other: Any) -> RewardPool:
    return RewardPool(router, **({"workers": 2, "timeout_s": 0.5, "on_error": "stop", "max_failure_share": 0.5} | other))


@pytest.fixture(scope="module")
def stopping(router: RewardRouter) -> Any:
    with make_pool(router) as pool:
        yield pool


@pytest.fixture(scope="module")
def excluding(router: RewardRouter) -> Any:
    with make_pool(router, on_error="exclude") as pool:
        yield pool


# Values


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (2, 2.0),
        (-0.25, -0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (torch.tensor(0.125), 0.125),
        (torch.tensor(True), 1.0),
        (Fraction(1, 4), 0.25),
        (None, None),
    ],
)
def test_numbers_of_every_kind_are_scores(value: object, score: float | None) -> None:
    assert as_score(value) == score


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "finite, the function returned nan"),
        (np.float32("inf"), "finite, the function returned inf"),
        (torch.tensor(float("-inf")), "finite, the function returned -inf"),
        ("1", "one number .* returned '1' of type str"),
        ([1.0], r"one number .* returned \[1.0\] of type list"),
        (torch.ones(2), "one number .* of type Tensor"),
        (1j, "one number .* of type complex"),
    ],
)
def test_anything_else_is_an_error(value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        as_score(value)


# Built-in functions


def test_exact_match_ignores_only_outer_white_space() -> None:
    assert [exact_match(text, 42) for text in ("42", " 42\n", "4 2", "42.0", "")] == [1.0, 1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match=r"needs a ground truth.*data\.answer_key"):
        exact_match("42", None)


def test_reasoning_gym_rows_get_the_score_of_their_own_verifier() -> None:
    """countdown accepts any expression that reaches the target; the stored answer is only one of them."""
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=3)[0]
    metadata = entry["metadata"]
    other = "0 + " + metadata["expression"]
    for response in (metadata["expression"], other, "12", "no idea"):
        expected = reasoning_gym.get_score_answer_fn("countdown")(response, entry)
        for text in (f"  {response}\n", f"Let me see: <answer>1</answer> no, <answer>{response}</answer> it is."):
            assert score_reasoning_gym(entry["question"], text, entry["answer"], {"metadata": metadata}) == expected
    assert score_reasoning_gym("", metadata["expression"], None, {"source_dataset": "countdown", "metadata": metadata}) == 1.0


def test_reasoning_gym_metadata_may_be_json_text() -> None:
    info = {"source_dataset": "basic_arithmetic", "metadata": '{"expression": "5 - 3"}'}
    assert score_reasoning_gym("5 - 3 =", " 2 ", "2", info) == 1.0
    with pytest.raises(ValueError, match=r"needs extra_info\.source_dataset.*extra_info has index"):
        score_reasoning_gym("5 - 3 =", "2", "2", {"index": 1})


# Finding the user's function


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("def compute_score(response): return 0", ("response",)),
        ("def compute_score(ground_truth, response): return 0", ("response", "ground_truth")),
        ("def compute_score(*, extra_info, prompt): return 0", ("prompt", "extra_info")),
        ("def compute_score(response, **others): return 0", ("prompt", "response", "ground_truth", "data_source", "extra_info", "ability")),
        ("def compute_score(response, strictness=3): return 0", ("response",)),
        ("class Judge:\n    def __call__(self, response): return 0\ncompute_score = Judge()", ("response",)),
    ],
)
def test_a_function_gets_the_arguments_it_names(tmp_path: Path, source: str, arguments: tuple[str, ...]) -> None:
    _, wanted = custom_function(write(tmp_path / "mine.py", source), "compute_score").load()
    assert sorted(wanted) == sorted(arguments)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def compute_score(a): return 0", r"mine.py:compute_score\(a\) asks for a; .*out of prompt, response, ground_truth, data_source"),
        ("def compute_score(response, x, y, z): return 0", "asks for x, y, z; "),
        ("def compute_score(solution_str, ground_truth): return 0", "asks for solution_str; "),
        ("def compute_score(response, /): return 0", "asks for response; it is called by keyword"),
        ("def compute_score(): return 0", "takes none of the arguments"),
        ("def compute_score(*args): return 0", "takes none of the arguments"),
        ("async def compute_score(response): return 0", "is async; write a plain function"),
        ("compute_score = 3", "'compute_score' in .*mine.py is a int, not a function"),
        (
            "from os.path import join\ndef score(response): return 0\ndef other(): pass",
            "no function 'compute_score'; it defines other, score$",
        ),
        ("", "it defines no functions"),
    ],
)
def test_a_wrong_function_is_refused_at_the_start(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        custom_function(write(tmp_path / "mine.py", source), "compute_score")


@pytest.mark.parametrize(
    ("source", "last_line"),
    [
        ("import numpy\nimport not_there_at_all", "ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("def compute_score(response:\n    return 0", "SyntaxError: "),
        ("import sys\nsys.exit('bye')", "SystemExit: bye"),
    ],
)
def test_a_file_that_fails_to_import_shows_the_users_traceback(tmp_path: Path, source: str, last_line: str) -> None:
    path = write(tmp_path / "mine.py", source)
    with pytest.raises(ValueError, match="fails when it is imported") as caught:
        custom_function(path, "compute_score")
    lines = str(caught.value).splitlines()
    assert lines[-1].startswith(last_line)
    assert f'File "{path}"' in "".join(lines[1:3])  # first, with "Traceback" above it unless it is a SyntaxError
    assert "loading.py" not in str(caught.value)


def test_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.custom_fn\.path: .* is a folder; give the Python file"):
        custom_function(str(tmp_path), "compute_score")
    with pytest.raises(ValueError, match=r"reward\.custom_fn\.path: there is no file .*/gone\.py"):
        custom_function(str(tmp_path / "gone.py"), "compute_score")


# Routing by data source


def test_two_sources_of_one_batch_go_to_their_own_functions(tmp_path: Path) -> None:
    router = RewardRouter(
        data_sources={"data.train_files": {"text": 5, "sums": 5}}, default="exact_match", by_source={"sums": "reasoning_gym"}
    )
    info = {"source_dataset": "basic_arithmetic", "metadata": "{}"}
    samples = [
        sample("12 or 3", 0, data_source="text"),
        sample("12 or 3", 1, data_source="sums", extra_info=info),  # the verifier gives partial credit: 1 of 7 characters
        sample("3", 2, data_source="text"),
    ]
    with make_pool(router, timeout_s=60) as pool:
        assert pool.score(samples).rewards == [0.0, pytest.approx(1 / 7), 1.0]


def test_every_value_without_a_function_is_listed_before_the_run() -> None:
    with pytest.raises(ValueError) as caught:
        RewardRouter(
            data_sources={"data.train_files": {"math": 90, "math ": 3, "": 2, None: 1}, "data.val_files": {"code": 7}},
            by_source={"math": "exact_match"},
        )
    message = str(caught.value)
    assert "  'math ': 3 rows of data.train_files (did you mean 'math'?)\n" in message
    assert "  '': 2 rows of data.train_files\n" in message
    assert "  null or no such column: 1 rows of data.train_files\n" in message
    assert "  'code': 7 rows of data.val_files\n" in message
    assert "'math': 90" not in message
    assert "Known values (reward.by_source): 'math'." in message
    assert "reward.default to one of exact_match, reasoning_gym" in message
    assert "reward.custom_fn.path=FILE.py" in message


def test_a_custom_function_or_a_default_makes_the_column_optional(router: RewardRouter) -> None:
    sources: dict[str, dict[str | None, int]] = {"data.train_files": {None: 4, "": 1, "new": 2}}
    default = RewardRouter(data_sources=sources, default="exact_match")
    assert [str(default.route(source)) for source in sources["data.train_files"]] == ["exact_match"] * 3
    [custom] = router.functions
    assert RewardRouter(data_sources=sources, custom_path=custom.path, by_source={"new": "exact_match"}).functions == (custom,)


def test_a_name_that_is_no_built_in_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"reward\.by_source\.math='exactmatch' is no built-in reward \(did you mean 'exact_match'\?\)"):
        RewardRouter(data_sources={}, by_source={"math": "exactmatch"})


def test_a_source_that_no_row_has_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    RewardRouter(data_sources=ONE_SOURCE, default="exact_match", by_source={"tusk": "exact_match"})
    assert "reward.by_source lists 'tusk', which no row has (did you mean 'task'?)" in caplog.text


# Failing functions


@pytest.mark.parametrize(
    ("response", "last_line"),
    [
        ("raise", "KeyError: 'deep inside'"),
        ("exit", "SystemExit: 0"),
        ("interrupt", "KeyboardInterrupt"),
        ("nan", "ValueError: a reward must be finite"),
        ("text", "TypeError: a reward must be one number"),
        ("list", "TypeError: a reward must be one number"),
        ("die", "the function ended its process (exit code 7)"),
    ],
)
def test_a_failing_sample_stops_the_run_and_is_named(stopping: RewardPool, response: str, last_line: str) -> None:
    with pytest.raises(RewardError) as caught:
        stopping.score(batch("score 1", "score 0", "score 0.5", response, "score 1", "score 0", "score 0", "score 1"))
    lines = str(caught.value).splitlines()
    assert "behaviours.py:compute_score failed on step 1 sample 3 (data_source 'task'):" in lines[0]
    assert lines[-2].startswith(last_line)
    assert lines[-1].startswith("reward.on_error=exclude")
    assert stopping.score(batch("score 0.25", "score 2")).rewards == [0.25, 2.0]  # the pool goes on


def test_the_traceback_is_the_users_own(stopping: RewardPool) -> None:
    with pytest.raises(RewardError) as caught:
        stopping.score(batch("raise"))
    text = str(caught.value)
    assert "behaviours.py" in text and "in compute_score" in text and "in helper" in text
    assert "worker.py" not in text


def test_failed_and_abstaining_samples_are_excluded_and_counted(excluding: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    scores = excluding.score(batch("score 1", "none", "score 0", "raise", "exit", "score 0.5", "nan", "score 2"))
    assert [None if math.isnan(reward) else reward for reward in scores.rewards] == [1.0, None, 0.0, None, None, 0.5, None, 2.0]
    assert (scores.abstained, len(scores.failures), scores.timed_out) == (1, 3, 0)
    assert "3 of 8 samples are left out" in caplog.text and "step 1 sample 3" in caplog.text


def test_too_large_a_share_of_failures_stops_all_the_same(excluding: RewardPool) -> None:
    with pytest.raises(
        RewardError, match=r"(?s)3 of 4 reward calls failed \(75%\), more than reward.max_failure_share=0.5 .*sample 0.*deep"
    ):
        excluding.score(batch("raise", "raise", "score 1", "raise"))


def test_abstaining_is_no_failure(stopping: RewardPool) -> None:
    scores = stopping.score(batch("none", "none"))
    assert all(math.isnan(reward) for reward in scores.rewards)
    assert scores.failures == []


def test_hung_calls_are_killed_and_the_workers_replaced(router: RewardRouter, excluding: RewardPool) -> None:
    excluding.score(batch("score 1", "score 0"))  # the workers have started
    hung = ["loop", "sleep", "regex", "loop", "sleep", "regex", "stuck", "loop", "sleep", "stuck"]
    started = time.monotonic()
    scores = excluding.score(batch(*hung, *["score 1"] * 10))
    rewards = scores.rewards
    seconds = time.monotonic() - started
    assert all(math.isnan(reward) for reward in rewards[:10]) and rewards[10:] == [1.0] * 10
    assert 0.5 * 10 / 2 <= seconds < 0.5 * 10 / 2 + 15  # a new process takes its time on a busy machine
    assert (scores.abstained, len(scores.failures), scores.timed_out) == (0, 10, 10)
    deadline = time.monotonic() + 10
    while len(set(excluding.score(batch(*["pid"] * 32)).rewards)) < 2:  # two processes again
        assert time.monotonic() < deadline


def test_a_hung_sample_is_named_when_it_stops_the_run(stopping: RewardPool) -> None:
    with pytest.raises(RewardError, match=r"(?s)step 1 sample 1 .*no result after reward.timeout_s=0.5 seconds"):
        stopping.score(batch("score 1", "loop", "sleep", "loop"))


def test_functions_run_in_the_main_thread_of_another_process(stopping: RewardPool) -> None:
    assert stopping.score(batch("alarm", "swallow", "alarm")).rewards == [1.0, 1.0, 1.0]
    assert os.getpid() not in stopping.score(batch("pid", "pid")).rewards
    time.sleep(1.1)  # the alarms left behind by the function have been cancelled
    assert stopping.score(batch("score 1")).rewards == [1.0]


def test_a_sample_that_cannot_be_sent_is_named(stopping: RewardPool) -> None:
    unsendable: Callable[[], int] = lambda: 0  # noqa: E731
    with pytest.raises(RewardError, match=r"(?s)step 1 sample 0 .*cannot be sent to a worker process"):
        stopping.score([sample("score 1", extra_info=unsendable)])


def test_equal_rewards_over_several_batches_are_warned_about_once(stopping: RewardPool, caplog: pytest.LogCaptureFixture) -> None:
    stopping.score(batch("score 1", "score 0"))
    warnings = []
    for _ in range(5):
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            stopping.score(batch("score 0", "score 0", "none"))
            warnings.append("every reward of the last 3 batches was 0;" in caplog.text)
    assert warnings == [False, False, True, False, False]


# Processes

TRAINER = """
import os, sys, time
print("main module runs", flush=True)
from tridentrl.rewards.pool import RewardPool, RewardSample
from tridentrl.rewards.routing import RewardRouter

router = RewardRouter(data_sources={"train": {None: 1}}, custom_path=sys.argv[1])
pool = RewardPool(router, workers=1, timeout_s=60, on_error="stop", max_failure_share=0.1)
sample = RewardSample(id="s", prompt="", response=sys.argv[2], ground_truth=None, data_source=None, extra_info=None)
print(int(pool.score([sample]).rewards[0]), flush=True)
pool.submit([RewardSample(id="s", prompt="", response="loop", ground_truth=None, data_source=None, extra_info=None)])
time.sleep(60)
"""


def test_workers_skip_the_main_script_and_die_with_a_killed_trainer(router: RewardRouter, tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`: run again in a worker it would start workers itself."""
    [function] = router.functions
    command = [sys.executable, write(tmp_path / "train.py", TRAINER), str(function.path), "pid"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "main module runs\n"
        reward_worker = psutil.Process(int(trainer.stdout.readline()))
        trainer.kill()
    _, alive = psutil.wait_procs([reward_worker], timeout=5)
    assert not alive


def test_a_worker_imports_no_torch(tmp_path: Path) -> None:
    source = "import sys\ndef compute_score(response): return 'torch' in sys.modules"
    router = RewardRouter(data_sources=ONE_SOURCE, custom_path=write(tmp_path / "mine.py", source))
    with make_pool(router) as pool:
        assert pool.score(batch("")).rewards == [0.0]


def test_loading_time_does_not_count_as_a_samples_time(tmp_path: Path) -> None:
    source = "import time\ntime.sleep(0.8)\ndef compute_score(response): return 1"
    router = RewardRouter(data_sources=ONE_SOURCE, custom_path=write(tmp_path / "mine.py", source))
    with make_pool(router, timeout_s=0.5) as pool:
        assert pool.score(batch("a", "b")).rewards == [1.0, 1.0]


def test_the_share_of_failures_counts_over_the_parts_of_all_ranks(excluding: RewardPool) -> None:
    failing = excluding.collect(excluding.submit(batch("raise", "raise")))  # alone more than reward.max_failure_share=0.5
    healthy = excluding.collect(excluding.submit(batch("score 1", "score 0")))
    excluding.judge([failing, healthy])
    with pytest.raises(RewardError, match="2 of 3 reward calls failed"):
        excluding.judge([failing, excluding.collect(excluding.submit(batch("score 1")))])
