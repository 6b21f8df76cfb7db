from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
