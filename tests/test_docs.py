"""The docs against the code: settings, links, files and code blocks. Not covered here: whether sentences are true."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tridentrl.algos import get_algorithm_registry, registry
from tridentrl.configs.convert import key_paths
from tridentrl.configs.load import schema_keys
from tridentrl.rewards.loading import FunctionSpec

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OWN_KEYS = {path for algorithm in get_algorithm_registry().values() for path in key_paths(algorithm.Config, "algorithm")}
KEYS = {*schema_keys(), *OWN_KEYS}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(sorted(SECTIONS))})\.[a-z_]+(?:\.[a-z_]+)*(?![\w(/])")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def with_blocks(language: str) -> list[Any]:
    return [pytest.param(block, id=f"{page.name}-{i}") for page in PAGES for i, block in enumerate(blocks(page, language))]


def slugs(page: Path) -> set[str]:
    """Anchors that GitHub makes of the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_the_page_of_settings_is_made_from_the_present_code() -> None:
    page = runpy.run_path(str(ROOT / "tools" / "make_config_docs.py"))["page"]
    assert (ROOT / "docs" / "config.md").read_text() == page(), "docs/config.md is old: run `make docs`"


def test_the_page_of_settings_has_every_key() -> None:
    sections = {key for key in KEYS if any(other.startswith(f"{key}.") for other in KEYS)}
    listed = set(re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs" / "config.md").read_text(), re.MULTILINE))
    assert listed == KEYS - sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            if not target.exists() or (anchor and anchor not in slugs(target)):
                wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|txt|svg))`", page.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_settings_exist(page: Path) -> None:
    below_mappings = ("reward.by_source.",)
    files = {"trainer.pt"}  # of a checkpoint
    named = DOTTED.findall(re.sub(r"\[[^\]]*\]\([^)]*\)", "", page.read_text()))
    assert not sorted({key for key in named if key not in KEYS | files and not key.startswith(below_mappings)})


def keys_of(tree: Mapping[str, Any], where: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{where}{name}"
        if isinstance(value, Mapping) and key not in ("reward.by_source", "reward.models", "algorithm.tasks"):
            yield from keys_of(value, f"{key}.")
        else:
            yield key


@pytest.mark.parametrize("block", with_blocks("yaml"))
def test_yaml_examples_have_known_settings(block: str) -> None:
    assert set(keys_of(yaml.safe_load(block))) <= KEYS


@pytest.mark.parametrize("block", [param for param in with_blocks("python") if "def compute_score" in param.values[0]])
def test_reward_examples_score(block: str, tmp_path: Path) -> None:
    path = tmp_path / "my_reward.py"
    path.write_text(block)
    function, wanted = FunctionSpec("compute_score", str(path)).load()
    given = {"response": "12", "ground_truth": "12", "extra_info": None}
    assert function(**{name: given[name] for name in wanted}) == 1.0
    assert function(**{name: (given | {"response": "no"})[name] for name in wanted}) == 0.0


def test_the_example_of_an_algorithm_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))
    (block,) = [block for block in blocks(ROOT / "docs" / "algorithms.md", "python") if "@register" in block]
    exec(compile(block, "mine.py", "exec"), {"__name__": "mine"})
    assert get_algorithm_registry()["mine"]().roles(kl_coef=0.1) == ("actor",)
