"""Worker processes that run reward functions: a hung or crashing one costs its sample, never the run's time or its other samples."""

from __future__ import annotations

import functools
import logging
import math
import multiprocessing
import multiprocessing.spawn
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pickle import PicklingError
from types import TracebackType
from typing import Any, Literal

from pebble import CONSTS, ProcessExpired, ProcessPool
from pebble.pool.process import WORKERS_NAME

from tridentrl.rewards import worker
from tridentrl.rewards.loading import ARGUMENTS
from tridentrl.rewards.routing import RewardRouter

logger = logging.getLogger(__name__)

_TIMED_OUT = "no result"
EQUAL_BATCHES = 3
"""Batches in a row with one and the same reward throughout after which a warning is logged."""


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """One response to score."""

    id: str
    """What an error message calls it, for example 'step 3 row 12 sample 2'."""
    prompt: str
    response: str
    ground_truth: Any
    data_source: str | None
    extra_info: Any
    ability: Any = None


@dataclass(frozen=True)
class Pending:
    """Samples being scored; for `RewardPool.collect`."""

    samples: Sequence[RewardSample]
    futures: Sequence[Future[worker.Outcome]]


@dataclass(frozen=True)
class Scores:
    """What became of the samples of one `submit`."""

    rewards: list[float]
    """In the order of the samples; NaN where the sample abstained or failed."""
    abstained: int
    failures: list[str]
    """What went wrong, a text for each failed sample."""
    timed_out: int
    """How many of the failures ran out of time."""


class RewardError(RuntimeError):
    """A reward function failed, or too many calls of one step did."""


class RewardPool:
    """Scores samples in `workers` processes, each call in its process's main thread and for at most `timeout_s` seconds.

    A call fails when it raises (SystemExit and KeyboardInterrupt too), runs out of time, kills its process or returns anything but a
    finite number or None. `on_error="stop"` raises RewardError at the first failure, "exclude" scores the sample NaN, which
    leaves it out of statistics and loss, until more than `max_failure_share` of a batch fail. None is an abstention: NaN, no failure.
    Workers are fresh processes: they inherit no signal handler, and of this package they import `rewards` only.
    """

    def __init__(
        self, router: RewardRouter, *, workers: int, timeout_s: float, on_error: Literal["stop", "exclude"], max_failure_share: float
    ) -> None:
        _keep_main_module_out_of_workers()
        # Native code is deaf to SIGTERM until it returns. Workers are ended one after another, so waiting long for each adds up.
        CONSTS.term_timeout = 0.5
        self._router = router
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._max_failure_share = max_failure_share
        self._equal_batches = 0
        self._pool = ProcessPool(
            max_workers=workers,
            initializer=worker.start,
            initargs=(router.functions, os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )
        assert self._pool.active  # asking starts the workers: they load their functions while the models load

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, busy ones too."""
        self._pool.stop()
        self._pool.join()

    def score(self, samples: Sequence[RewardSample]) -> Scores:
        """Score a batch that is here as a whole. Raises RewardError as the class says."""
        scores = self.collect(self.submit(samples))
        self.judge([scores])
        return scores

    def submit(self, samples: Sequence[RewardSample]) -> Pending:
        """Start scoring and return at once."""
        return Pending(
            samples,
            [
                self._pool.schedule(
                    worker.score,
                    args=(self._router.route(sample.data_source), {name: getattr(sample, name) for name in ARGUMENTS}),
                    timeout=self._timeout_s,
                )
                for sample in samples
            ],
        )

    def collect(self, pending: Pending) -> Scores:
        """Wait for what `submit` started. Raises RewardError at the first failure with `on_error="stop"`."""
        rewards: list[float] = []
        failures: list[str] = []
        abstained = timed_out = 0
        try:
            for sample, future in zip(pending.samples, pending.futures, strict=True):
                outcome = self._outcome(future)
                if outcome.error is not None:
                    timed_out += outcome.error.startswith(_TIMED_OUT)
                    failures.append(self._describe(sample, outcome.error))
                    if self._on_error == "stop":
                        raise RewardError(failures[0] + "\nreward.on_error=exclude leaves such samples out instead of ending the run")
                elif outcome.score is None:
                    abstained += 1
                rewards.append(math.nan if outcome.score is None else outcome.score)
        except BaseException:
            for future in pending.futures:
                future.cancel()
            raise
        return Scores(rewards, abstained, failures, timed_out)

    def judge(self, batch: Sequence[Scores], *, watch: bool = True) -> None:
        """Look at a whole batch, the parts of all ranks: raises RewardError when too much of it failed, warns when it cannot teach.

        `watch`: whether this batch counts among those that should not all have one and the same reward (training, not evaluation).
        """
        self._judge_failures([text for scores in batch for text in scores.failures], sum(len(scores.rewards) for scores in batch))
        if watch:
            self._watch_for_equal([reward for scores in batch for reward in scores.rewards])

    def _outcome(self, future: Future[worker.Outcome]) -> worker.Outcome:
        try:
            return future.result()
        except TimeoutError:
            return worker.Outcome(error=f"{_TIMED_OUT} after reward.timeout_s={self._timeout_s:g} seconds; its process was killed")
        except ProcessExpired as error:
            return worker.Outcome(error=f"the function ended its process (exit code {error.exitcode})")
        except (AttributeError, TypeError, PicklingError) as error:
            return worker.Outcome(error=f"the sample cannot be sent to a worker process: {error}")

    def _describe(self, sample: RewardSample, error: str) -> str:
        function = self._router.route(sample.data_source)
        return f"reward function {function} failed on {sample.id} (data_source {sample.data_source!r}):\n{error}"

    def _judge_failures(self, failures: list[str], total: int) -> None:
        """Log what failed, or raise when it was too much of the batch."""
        if not failures:
            return
        share = len(failures) / total
        if share > self._max_failure_share:
            raise RewardError(
                f"{len(failures)} of {total} reward calls failed ({share:.0%}), more than reward.max_failure_share="
                f"{self._max_failure_share:g} allows; the first:\n{failures[0]}"
            )
        logger.warning("%d of %d samples are left out, their reward failed; the first:\n%s", len(failures), total, failures[0])

    def _watch_for_equal(self, rewards: list[float]) -> None:
        """Warn once per streak of batches that all had one and the same reward: nothing can be learnt from those."""
        valid = {reward for reward in rewards if not math.isnan(reward)}
        self._equal_batches = self._equal_batches + 1 if len(valid) == 1 and len(rewards) > 1 else 0
        if self._equal_batches == EQUAL_BATCHES:
            logger.warning(
                "every reward of the last %d batches was %g; nothing can be learnt from that. Does the reward function (%s) hide an error,"
                " or is the task too hard or too easy?",
                EQUAL_BATCHES,
                valid.pop(),
                ", ".join(map(str, self._router.functions)),
            )


@functools.cache
def _keep_main_module_out_of_workers() -> None:
    """Spawned processes import the parent's main module again: a user's training script, with torch and vLLM behind it.

    Reward workers need nothing of it, so their preparation data loses it; other spawned processes keep theirs. Python 3.11 to 3.13 have
    no public switch. It can go when multiprocessing gets one.
    """
    original = multiprocessing.spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        if name == WORKERS_NAME:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    multiprocessing.spawn.get_preparation_data = get_preparation_data
