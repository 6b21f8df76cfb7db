import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.helpers import UNKNOWN_CASES
from tests.support.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close(patience=10.0)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The planner's records of a user's own runs are not for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def alone() -> Iterator[None]:
    """This process as the one rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", type=int, default=300, help="odd inputs that tests/whole/test_fuzz.py draws"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_number" in metafunc.fixturenames:
        metafunc.parametrize("case_number", range(int(metafunc.config.getoption("--cases") or 0)))


def _whole(config: pytest.Config) -> bool:
    """Whether all tests were asked for, of one tier or another."""
    return config.args == config.getini("testpaths") and not config.option.ignore


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two for a whole tier: one works while the other waits for its ranks. Else, and on a GPU, none."""
    return 2 if _whole(config) and not config.option.usepdb and not torch.cuda.is_available() else 0


def pytest_collection_finish() -> None:
    gc.freeze()  # so that a collection looks at what tests have made alone


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers, tier, test = dict[str, str](), "", ""
    for line in (Path(__file__).parent / "long_cases.txt").read_text().splitlines()[1:]:
        if line.startswith("    "):
            tiers[f"{test}[{line.strip()}]"] = tier
            continue
        tier, _, test = line.removesuffix(":").partition(" ")
        if not line.endswith(":"):
            tiers[test] = tier
    for item in items:
        if tier := tiers.pop(item.nodeid, ""):
            item.add_marker(tier)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    config.stash[UNKNOWN_CASES] = list(tiers) if _whole(config) else []
