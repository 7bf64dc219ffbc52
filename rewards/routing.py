"""Which reward function scores which row."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping

from tridentrl.rewards.functions import BUILTIN
from tridentrl.rewards.loading import FunctionSpec, custom_function

logger = logging.getLogger(__name__)


class RewardRouter:
    """Data source to function. The user's function scores every row; without one, `by_source` goes before `default`.

    `data_sources` holds the number of rows of each distinct value of the data-source column for each set, for example
    `{"data.train_files": {"math": 100}, "data.val_files": {None: 20}}`; None stands for a null and for a column that is not there.
    Raises ValueError that lists every value without a function. Values are compared as they are, white space included.
    """

    def __init__(
        self,
        *,
        data_sources: Mapping[str, Mapping[str | None, int]],
        custom_path: str | None = None,
        custom_name: str = "compute_score",
        default: str | None = None,
        by_source: Mapping[str, str] | None = None,
    ) -> None:
        by_source = dict(by_source or {})
        known = {"reward.default": default} if default is not None else {}
        _check_names(known | {f"reward.by_source.{source}": name for source, name in by_source.items()})
        self._by_source = {source: FunctionSpec(name) for source, name in by_source.items()}
        self._default = FunctionSpec(default) if default is not None else None
        if custom_path is not None:
            self._by_source, self._default = {}, custom_function(custom_path, custom_name)
        self._check_sources(data_sources)

    @property
    def functions(self) -> tuple[FunctionSpec, ...]:
        """Every function that a row can reach, each once."""
        specs = [*self._by_source.values(), *([self._default] if self._default else [])]
        return tuple(dict.fromkeys(specs))

    def route(self, data_source: str | None) -> FunctionSpec:
        """The function for a row of this source, one of those checked at the start."""
        spec = self._by_source.get(data_source, self._default) if data_source is not None else self._default
        assert spec is not None, f"data source {data_source!r} was not checked at the start"
        return spec

    def _check_sources(self, data_sources: Mapping[str, Mapping[str | None, int]]) -> None:
        seen = {source for counts in data_sources.values() for source in counts}
        for unused in self._by_source.keys() - seen:
            logger.warning("reward.by_source lists %r, which no row has%s", unused, _nearest(unused, (s for s in seen if s)))
        if self._default is not None:
            return
        unknown = [
            f"  {'null or no such column' if source is None else repr(source)}: {rows} rows of {files}"
            + _nearest(source or "", self._by_source)
            for files, counts in data_sources.items()
            for source, rows in counts.items()
            if source not in self._by_source
        ]
        if unknown:
            raise ValueError(
                "no reward function for these values of the column named by data.reward_fn_key:\n"
                + "\n".join(unknown)
                + f"\nKnown values (reward.by_source): {', '.join(map(repr, self._by_source)) or 'none'}. Map them there or set"
                f" reward.default to one of {', '.join(BUILTIN)}, or score every row with your own function: reward.custom_fn.path=FILE.py"
            )


def _check_names(names: Mapping[str, str]) -> None:
    wrong = [f"{key}={name!r} is no built-in reward{_nearest(name, BUILTIN)}" for key, name in names.items() if name not in BUILTIN]
    if wrong:
        raise ValueError(
            "; ".join(wrong) + f"; there are {', '.join(BUILTIN)}, and reward.custom_fn.path=FILE.py for a function of your own"
        )


def _nearest(value: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(value, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
