"""Programs that are distributed by torch as well: gradients would be averaged twice, or data shared out by another rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers_torch import small_model  # noqa: E402
from torch import distributed, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim import SGD  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import psd_client.torch as psd  # noqa: E402


@pytest.fixture
def group() -> Iterator[Callable[[int], None]]:
    """group(n) begins torch's process group of n processes, of which the others do nothing."""

    def begin(world_size: int) -> None:
        distributed.init_process_group("fake", rank=world_size - 1, world_size=world_size, store=FakeStore())

    yield begin
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.parametrize(("wrap", "where"), [(lambda model: model, "model"), (nn.Sequential, "model.0")])
def test_a_model_that_averages_gradients_itself_is_refused(
    group: Callable[[int], None], wrap: Callable[[Any], Any], where: str
) -> None:
    """It was accepted, and its gradients were averaged twice."""
    group(2)
    model = wrap(DistributedDataParallel(small_model()))

    with pytest.raises(TypeError, match=rf"^{where}: is a DistributedDataParallel.* pass {where}\.module"):
        psd.distribute(model, SGD(model.parameters(), lr=0.1), servers="127.0.0.1:1", rank=0, world_size=1, retry_timeout=0)


@pytest.mark.parametrize(("processes", "is_told"), [(0, False), (1, False), (3, True)])
def test_a_process_group_of_several_is_told_of(
    cluster: Callable[..., Any], group: Callable[[int], None], caplog: pytest.LogCaptureFixture, processes: int, is_told: bool
) -> None:
    if processes:
        group(processes)
    model = small_model()

    with caplog.at_level(logging.WARNING, "psd_client"):
        psd.distribute(model, SGD(model.parameters(), lr=0.1), servers=cluster(1).servers, rank=0, world_size=1).close()

    said = [text for text in caplog.messages if "process group" in text]
    assert len(said) == is_told
    assert all("process group of 3 processes" in text and "see process 2 of 3" in text for text in said)
