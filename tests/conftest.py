from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close(patience=10.0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=300, help="odd inputs that tests/test_fuzz.py draws")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case_number" in metafunc.fixturenames:
        metafunc.parametrize("case_number", range(int(metafunc.config.getoption("--cases") or 0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
