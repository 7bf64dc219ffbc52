"""Loading a configuration: what is accepted, what is refused and in which words, and that a saved one is the same again.

Not covered: rules between settings (test_config_rules.py) and the algorithms' own settings.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import FrozenInstanceError, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tridentrl.configs import schema as schema_module
from tridentrl.configs.convert import ConfigError, hints, typed
from tridentrl.configs.load import load_config, save_config, schema_keys, to_dict, typed_options
from tridentrl.configs.schema import Config

REQUIRED = ["data.train_files=a.arrow", "model.actor_pretrained_model_name_or_path=m"]
FILE = "data: {train_files: a.arrow}\nmodel: {actor_pretrained_model_name_or_path: m}\n"


@dataclass(frozen=True, kw_only=True)
class Mine:
    """Stands for an algorithm's typed settings."""

    group_size: int = 8
    clip_coef: float = 0.2

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size}: a group needs two samples; set 2 or more\nnothing else")


def load(*overrides: str) -> Config:
    return load_config([*REQUIRED, *overrides])


def from_file(folder: Path, text: str, *overrides: str) -> Config:
    path = folder / "run.yaml"
    path.write_text(FILE + text)
    return load_config(overrides, config_file=path)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


def refused_in_file(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_file(folder, text, *overrides)
    return str(caught.value)


def value_of(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def test_the_command_line_wins_over_the_file_and_the_file_over_the_name_and_that_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("seed: 2\ntrainer: {total_steps: 2, eval_interval: 2, save_interval: 2}\n")
    (tmp_path / "run.yaml").write_text(FILE + "trainer: {total_steps: 3, eval_interval: 3}\n")
    config = load_config(["trainer.total_steps=4"], tmp_path / "run.yaml", config_name="base", config_dir=tmp_path)
    assert (config.trainer.total_steps, config.trainer.eval_interval, config.trainer.save_interval) == (4, 3, 2)
    assert (config.seed, config.trainer.gradient_clip_val, config.trainer.kl_coef) == (2, 0.1, 0.001)


def test_a_quoted_list_a_plus_and_a_tilde_on_the_command_line(tmp_path: Path) -> None:
    files = 'data.train_files=["a/train-00000-of-00002.arrow","a/train-00001-of-00002.arrow"]'
    assert load(files).data.train_files == ("a/train-00000-of-00002.arrow", "a/train-00001-of-00002.arrow")
    assert load("+algorithm.group_size=4", "++seed=5").algorithm.options == {"group_size": 4}
    assert from_file(tmp_path, "seed: 7", "~seed").seed == 1
    assert "nothing to remove" in refused("~trainer.total_steps")
    assert "sweep" in refused("seed=1,2") and "@" in refused("a@b=3")
    assert "cannot read the override exp_name=a=b" in refused("exp_name=a=b")
    assert load('exp_name="a=b"').exp_name == "a=b"


def test_interpolation_reads_other_keys_and_their_defaults(tmp_path: Path) -> None:
    config = from_file(tmp_path, "exp_name: run-${seed}\ntrainer: {eval_interval: '${trainer.save_interval}'}\n", "seed=3")
    assert (config.exp_name, config.trainer.eval_interval) == ("run-3", 50)
    assert "cannot work out exp_name: Interpolation key 'nothing.here' not found" in refused("exp_name=${nothing.here}")


def test_an_unknown_key_is_refused_with_where_it_stands_and_the_key_it_means(tmp_path: Path) -> None:
    text = refused("trainer.kl_coeff=1", "data.kl_coef=3", "trainr.total_steps=3", "zzz=1")
    assert "unknown key trainer.kl_coeff (command line: trainer.kl_coeff=1); did you mean trainer.kl_coef?" in text
    assert "unknown key data.kl_coef (command line: data.kl_coef=3); that key is trainer.kl_coef" in text
    assert "unknown key trainr.total_steps (command line: trainr.total_steps=3); that key is trainer.total_steps" in text
    assert "unknown key zzz (command line: zzz=1); the keys of the configuration are exp_name, output_dir, seed, data" in text
    assert "4 problems" in text
    text = refused_in_file(tmp_path, "optimizer:\n  lr: 1e-6\n  learning_rte: 3\n")
    assert f"unknown key optimizer.learning_rte ({tmp_path}/run.yaml, line 5)" in text


def test_an_algorithms_own_keys_are_as_strict() -> None:
    assert typed_options(Mine, load("algorithm.group_size='4'").algorithm) == Mine(group_size=4)
    for overrides, expected in [
        (
            ["algorithm.group_siz=4"],
            "unknown key algorithm.group_siz (command line: algorithm.group_siz=4); did you mean algorithm.group_size?",
        ),
        (["algorithm.kl_coeff=1"], "unknown key algorithm.kl_coeff (command line: algorithm.kl_coeff=1); did you mean trainer.kl_coef?"),
        (["algorithm.lr=1"], "unknown key algorithm.lr (command line: algorithm.lr=1); that key is optimizer.lr"),
        (["algorithm.nam=ppo"], "did you mean algorithm.name?"),
        (["algorithm.group_size=8.5"], "algorithm.group_size must be an integer, got 8.5 (float) (command line: algorithm.group_size=8.5)"),
        (["algorithm.group_size=1"], "- algorithm.group_size=1: a group needs two samples; set 2 or more\n  - algorithm: nothing else"),
        (["algorithm.vf_coef=1"], "(command line: algorithm.vf_coef=1); the keys of algorithm are group_size, clip_coef"),
    ]:
        with pytest.raises(ConfigError) as caught:
            typed_options(Mine, load(*overrides).algorithm)
        assert expected in str(caught.value)


def test_a_key_given_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    text = refused_in_file(tmp_path, "optimizer:\n  lr: 1e-6\n  eps: 1e-8\n  lr: 1e-5\n")
    assert "line 6: optimizer.lr is given a second time, first in line 4" in text


def test_a_null_section_is_its_defaults_and_takes_overrides(tmp_path: Path) -> None:
    config = from_file(tmp_path, "trainer:\nreward: {custom_fn: null, by_source: null}\n", "trainer.total_steps=5")
    assert (config.trainer.total_steps, config.trainer.eval_interval, config.reward.by_source) == (5, 20, {})
    assert load("rollout=null").rollout == load().rollout
    assert "trainer is a section, not a value, got 5 (int)" in refused("trainer=5")
    assert "goes into trainer, which is set to 5" in refused("trainer=5", "trainer.total_steps=5")


def test_missing_required_keys_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([])
    assert "data.train_files is required" in str(caught.value)
    assert "model.actor_pretrained_model_name_or_path is required" in str(caught.value)
    assert "data.train_files must be a list, each item text that is not empty, with at least one item, got null" in refused(
        "data.train_files=null"
    )


@pytest.mark.parametrize("written", ["1e-6", '"1e-6"', "0.000001", "1.0E-06"])
def test_forms_of_one_learning_rate_are_equal_in_a_file_and_on_the_command_line(tmp_path: Path, written: str) -> None:
    assert load(f"optimizer.lr={written}").optimizer.lr == 1e-6
    assert from_file(tmp_path, f"optimizer: {{lr: {written}}}\n").optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("key", "written", "expected"),
    [
        ("data.train_batch_size", '"8"', 8),
        ("data.train_batch_size", "8.0", 8),
        ("data.val_batch_size", "null", None),
        ("data.train_files", "a.arrow", ("a.arrow",)),
        ("data.train_files", '"[a, b]"', ("[a, b]",)),
        ("rollout.stop", "END", ("END",)),
        ("data.shuffle", "off", False),
        ("data.apply_chat_template", "auto", "auto"),
        ("data.apply_chat_template", "yes", True),
        ("parallel.tensor", "2", 2),
        ("parallel.recompute", "none", "none"),
        ("optimizer.betas", "[0.9, 0.95]", (0.9, 0.95)),
        ("exp_name", "off", "off"),
        ("exp_name", "010", "010"),
        ("exp_name", '"1e-6"', "1e-6"),
        ("exp_name", "2024-01-01", "2024-01-01"),
        ("trainer.total_steps", "1_000", 1000),
    ],
)
def test_a_value_means_the_same_in_a_file_and_on_the_command_line(tmp_path: Path, key: str, written: str, expected: Any) -> None:
    section, _, name = key.rpartition(".")
    document = f"{section}:\n  {name}: {written}\n" if section else f"{name}: {written}\n"
    document = document if section != "data" else f"data:\n  train_files: z\n  {name}: {written}\n"
    document = document.replace("  train_files: z\n", "") if name == "train_files" else document
    path = tmp_path / "run.yaml"
    path.write_text(document)
    for config in (
        load_config([*([] if name == "train_files" else REQUIRED[:1]), REQUIRED[1]], path),
        load_config([*REQUIRED, f"{key}={written}"]),
    ):
        got = value_of(config, key)
        assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("key", "written", "words"),
    [
        ("data.train_batch_size", "8.5", "data.train_batch_size must be an integer >= 1, got 8.5 (float)"),
        ("data.train_batch_size", "true", "data.train_batch_size must be an integer >= 1, got true (bool)"),
        ("data.train_batch_size", "-1", "data.train_batch_size must be an integer >= 1, got -1 (int)"),
        ("data.train_batch_size", "null", "data.train_batch_size must be an integer >= 1, got null"),
        ("optimizer.lr", "nan", "optimizer.lr must be a finite number > 0, got nan (float)"),
        ("optimizer.lr", "true", "optimizer.lr must be a finite number > 0, got true (bool)"),
        ("optimizer.betas", "[0.9]", "optimizer.betas must be a list of 2, each item a finite number >= 0 and < 1, got [0.9] (list)"),
        ("parallel.tensor", "true", "parallel.tensor must be an integer >= 1 or auto, got true (bool)"),
        ("parallel.recompute", "off", "parallel.recompute must be one of none, selective, full, got 'off' (str)"),
        ("reward.custom_fn.path", "123", "got 123 (int)"),
        ("reward.by_source", "[a]", "reward.by_source must be a mapping from text to text that is not empty, got ['a'] (list)"),
        ("seed", "-1", "seed must be an integer >= 0, got -1 (int)"),
        ("exp_name", '""', "exp_name must be text that is not empty, got '' (str)"),
        ("trainer.loggers", "[tensorboard, mlflow]", "each item one of tensorboard, jsonl, wandb, got ['tensorboard', 'mlflow'] (list)"),
    ],
)
def test_a_wrong_value_is_refused_by_key_value_and_type_wherever_it_is_written(tmp_path: Path, key: str, written: str, words: str) -> None:
    assert words in refused(f"{key}={written}")
    for name in reversed(key.split(".")):
        written = f"{{{name}: {written}}}"
    path = tmp_path / "run.yaml"
    path.write_text(written)
    with pytest.raises(ConfigError) as caught:
        load_config(REQUIRED, path)
    assert words in str(caught.value)


def test_a_number_where_text_is_wanted_is_told_how_to_quote() -> None:
    assert "exp_name='\"5\"'" in refused("exp_name=5")
    assert load('exp_name="5"').exp_name == "5"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for text, words in [
        ("a: [1", "is not valid YAML"),
        ("- 1\n", "must hold keys"),
        ("data.train_files: a", "write data.train_files nested"),
    ]:
        path = tmp_path / "bad.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            load_config([], path)
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config([], tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"no configuration other\.yaml in the folder .*; there: bad"):
        load_config([], config_name="other", config_dir=tmp_path)
    with pytest.raises(ConfigError, match="add --config-name=NAME"):
        load_config([], config_dir=tmp_path)


def test_a_saved_configuration_loads_again_equal_and_leaves_no_other_file(tmp_path: Path) -> None:
    config = load(
        'exp_name="1e-6"',
        'output_dir="off"',
        'data.train_files=["a","null"]',
        "rollout.stop=['\\${x}']",
        "algorithm.group_size=4",
        "reward.by_source={openai/gsm8k: exact_match, b: off}",
        "optimizer.lr=3e-7",
        "trainer.epochs=2",
        "trainer.total_steps=null",
    )
    assert config.rollout.stop == ("${x}",)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config([], tmp_path / "saved.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["saved.yaml"]
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["algorithm"] == {
        "name": "grpo",
        "path": None,
        "schedule": [],
        "tasks": {},
        "group_size": 4,
    }


def test_every_key_is_accepted_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    config = load()
    save_config(config, tmp_path / "all.yaml")
    assert load_config([], tmp_path / "all.yaml") == config
    overrides = []
    for key in schema_keys():
        value = to_dict(config)
        for name in key.split("."):
            value = value[name]
        if not isinstance(value, dict) or not value:
            overrides.append(f"{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10)).strip()}")
    assert len(overrides) > 60
    assert load_config(overrides) == config


def test_a_configuration_cannot_be_changed_after_loading() -> None:
    with pytest.raises(FrozenInstanceError):
        load().seed = 3  # type: ignore[misc]


def test_every_key_has_a_docstring() -> None:
    tree = ast.parse(inspect.getsource(schema_module))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for name, node in classes.items():
        documented = [
            before.target.id
            for before, after in zip(node.body, node.body[1:], strict=False)
            if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        ]
        assert documented == list(hints(getattr(schema_module, name)))


def test_typed_tells_of_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        typed(Mine, {"group_size": "x", "clip_coef": None, "other": 1}, where="algorithm", origins={"algorithm": "a.yaml"})
    assert len(caught.value.problems) == 3 and all("(a.yaml)" in problem for problem in caught.value.problems)
