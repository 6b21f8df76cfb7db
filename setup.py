"""What is inside the package compose when it is installed, and beside it in a checkout."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

MODELS = find_packages("models")
DATA = ("clusters", "recipes")


class BuildWithDefaults(build_py):
    """Takes train.toml along too, which is in no folder that becomes a package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_file("train.toml", str(Path(self.build_lib, "compose", "train.toml")))


setup(
    packages=[
        *find_packages(include=["compose", "compose.*"]),
        *(f"compose.models.{name}" for name in MODELS),
        *(f"compose.{name}" for name in DATA),
    ],
    package_dir={
        **{f"compose.models.{name}": f"models/{name}" for name in MODELS},
        **{f"compose.{name}": name for name in DATA},
    },
    package_data={
        "compose": ["py.typed"],
        "compose.cli": ["migrate_keys/*.toml"],
        "compose.planner": ["page.css", "page.js"],
        **{f"compose.{name}": ["*.toml"] for name in DATA},
    },
    cmdclass={"build_py": BuildWithDefaults},
)
