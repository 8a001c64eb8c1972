"""psd under Ray: the shards of a job as actors of a cluster, for programs that are Ray's own, such as those of Ray Train.

    import psd.ray

    shards = psd.ray.start(shards=2, checkpoint_dir="s3://bucket/run-7", checkpoint_steps=1000)
    trainer = TorchTrainer(train, train_loop_config={"shards": shards}, ...)
    trainer.fit()
    shards.stop()

A worker asks for the addresses as they are now: `psd_client.connect(shards.servers, run_id=shards.run_id)`; in Ray Train it has
its rank from there, elsewhere it says `rank=` and `world_size=`.
"""

from psd.cli.ray.shards import RayShards, start

__all__ = ["RayShards", "start"]
