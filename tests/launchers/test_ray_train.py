"""Ray Train with psd's shards on a Ray cluster of several nodes: the page's program, and one whose shards move."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from conftest import parent, servers_of, wait_until
from markdown_blocks import blocks
from source_tree import ROOT

ray = pytest.importorskip("ray")
pytest.importorskip("ray.train")

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def test_the_page_when_its_program_runs_then_ray_trains_with_the_shards(nodes, tmp_path):
    """As it is there, but for the bucket."""
    (program,) = (block.text for block in blocks(ROOT / "docs/launchers.md") if "TorchTrainer" in block.text)
    ray.init(address=nodes.address, log_to_driver=False)
    page = {"__name__": "__main__"}

    exec(program.replace("s3://bucket", str(tmp_path)), page)

    assert np.abs(page["trained"]["weight"] - 1).max() < 0.01, "it learns to add"
    assert list((tmp_path / "run-7").glob("timeline*"))
    assert servers_of(page["shards"].run_id) == {}


def test_trainer_when_the_node_of_a_shard_dies_then_goes_on_from_the_newest_checkpoint(nodes, tmp_path):
    """Workers without torch, whose ranks only Ray Train knows; what srun has left in their environment is another's.

    Each step adds 1.5: the end tells whether each has counted once.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    import psd.ray
    import psd_client

    def train(config):
        shards = config["shards"]
        with psd_client.connect(servers=shards.servers, run_id=shards.run_id, retry_timeout=5) as ps:
            ps.declare({"w": np.zeros(50_000, np.float32)}, psd_client.SGD(lr=1))
            (config["folder"] / f"{ps.rank}-of-{ps.world_size}-began-at-{ps.clock}").touch()
            while ps.clock < 300:
                ps.push_pull({"w": np.full(50_000, ps.rank + 1, np.float32)})
                threading.Event().wait(0.02)

    ray.init(
        address=nodes.address, log_to_driver=False, runtime_env={"env_vars": {"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "8"}}
    )
    shards = psd.ray.start(shards=2, lease=60, checkpoint_dir=tmp_path / "checkpoints", checkpoint_steps=20)
    trainer = DataParallelTrainer(
        train,
        train_loop_config={"shards": shards, "folder": tmp_path},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "ray"), failure_config=FailureConfig(max_failures=5)),
    )

    def break_it():
        wait_until(lambda: list((tmp_path / "checkpoints").glob("timeline*")), "there is a checkpoint")
        nodes.lose(parent(servers_of(shards.run_id)["1/2"]))

    breaker = threading.Thread(target=break_it)
    breaker.start()
    trainer.fit()
    breaker.join()

    with psd_client.connect(shards.servers, role="reader") as reader:
        w = reader.pull()["w"]
    assert (w[0], w[-1]) == (-450.0, -450.0)
    began = sorted(path.name for path in tmp_path.glob("*-began-at-*"))
    assert began[:1] + began[2:3] == ["0-of-2-began-at-0", "1-of-2-began-at-0"]
    assert int(began[1].rpartition("-")[2]) >= 20
    shards.stop()
