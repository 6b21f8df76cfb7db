"""All rules of a composition, and the check that ``compose.apply`` makes."""

from compose.config.addons import brought
from compose.config.comm_rules import COMM
from compose.config.mesh_rules import MESH
from compose.config.rule import Rule, Setup, problems_of
from compose.config.step_rules import STEP
from compose.errors import ConfigError

COMPOSITION: list[Rule[Setup]] = [
    *(MESH + STEP + COMM),
    *(rule for _, rules in brought("composition_rules") for rule in rules()),
]


def check_setup(setup: Setup) -> None:
    """Raise ConfigError, with all problems, if ``compose.apply`` cannot carry out ``setup``."""
    if problems := problems_of(COMPOSITION, setup):
        raise ConfigError(*problems)
