"""An arena that outlives its machine: believed only if the shard had ended in order."""

from __future__ import annotations

import dataclasses
import socket

import pytest
from shard_driver import Driver

from psd.contract.config import ConfigError, ServerConfig
from psd.rim.server import ShardServer
from psd.state.durability import boots, notes, state_directory


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A shard with a state directory, which trains, on a machine whose boot id is a file that tests change."""
    boot_id = tmp_path / "boot_id"
    boot_id.write_text("first\n")
    monkeypatch.setattr(boots, "_BOOT_ID", boot_id)
    driver = Driver(state_dir=str(tmp_path / "state"))
    driver.seats = driver.start()
    for seat in driver.seats:
        driver.push(seat, 0, 2.0)
    driver.boot_id = boot_id
    return driver


def test_a_process_that_was_killed_is_gone_on_from(driver):
    """The machine has been up all the time."""
    driver.restart(*driver.seats)

    assert driver.shard.is_recovered


def test_a_machine_that_went_down_is_not_believed(driver, tmp_path):
    """The shard says so and does not start; nothing is removed."""
    driver.boot_id.write_text("second\n")

    with pytest.raises(ConfigError, match="the machine went down before the shard had ended"):
        driver.restart()
    assert (tmp_path / "state" / "arena").exists()


def test_a_machine_that_went_down_lets_the_shard_begin_with_a_checkpoint(driver, tmp_path):
    """Where there is a place for checkpoints the arena is given up, as if it had been lost."""
    driver.boot_id.write_text("second\n")
    driver.config = dataclasses.replace(driver.config, checkpoint_dir=str(tmp_path / "checkpoints"))

    driver.restart()

    assert not driver.shard.is_recovered
    assert not (tmp_path / "state" / "arena").exists()


def test_a_shard_that_has_ended_in_order_is_believed_on_any_machine(driver):
    """As when a node is drained, and the volume attached to another one; but only until it is in use there."""
    driver.shard.close(keep=True)
    driver.boot_id.write_text("second\n")

    driver.restart(*driver.seats)

    assert driver.shard.is_recovered
    driver.boot_id.write_text("third\n")
    with pytest.raises(ConfigError, match="the machine went down"):
        driver.restart()


def test_a_shard_that_could_not_start_leaves_what_the_one_before_had_left_in_order(driver):
    """It has had the files in use for a moment. If the machine goes down then, they are believed all the same."""
    driver.shard.close(keep=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = dataclasses.replace(driver.config, listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(OSError, match="cannot bind"):
            ShardServer(config).start()
    driver.boot_id.write_text("second\n")

    driver.restart(*driver.seats)

    assert driver.shard.is_recovered


def test_a_shard_that_could_not_go_on_leaves_what_the_one_before_had_left_in_order(driver, tmp_path):
    """The same, where it is a note that makes no sense: that is what is said, and not that the machine went down."""
    notes.write(tmp_path / "state", "barriers", b"no such message")
    driver.shard.close(keep=True)

    for boot in ("first", "second"):
        driver.boot_id.write_text(f"{boot}\n")
        with pytest.raises(ConfigError, match=r"state: .*; this shard cannot go on with it"):
            driver._start()


def test_where_the_system_does_not_say_a_killed_shard_is_not_believed(driver, monkeypatch):
    """Its arena may have outlived the machine; one that was closed in order is believed."""
    monkeypatch.setattr(boots, "_boot_session", lambda: b"")
    monkeypatch.setattr(boots, "_is_in_memory", lambda _: False)
    driver.boot_id.unlink()
    driver.shard.close(keep=True)
    driver.restart(*driver.seats)
    assert driver.shard.is_recovered

    with pytest.raises(ConfigError, match="was killed, and this system does not tell whether the machine went down"):
        driver.restart()


@pytest.mark.parametrize("how", ["asked", "in memory"])
def test_where_the_system_says_it_in_another_way_a_killed_shard_is_gone_on_from(driver, monkeypatch, how):
    """macOS has a call for it. And what lies in memory alone cannot outlive the machine."""
    monkeypatch.setattr(boots, "_boot_session", lambda: b"session" if how == "asked" else b"")
    monkeypatch.setattr(boots, "_is_in_memory", lambda _: how != "asked")
    driver.boot_id.unlink()
    driver.shard.close(keep=True)
    driver.restart(*driver.seats)

    driver.restart(*driver.seats)

    assert driver.shard.is_recovered


def test_orders_of_a_job_that_is_over_are_not_the_next_ones(tmp_path):
    """Its arena has gone; the directory is the operator's, and stays."""
    notes.write(tmp_path, "orders", b"orders")
    found = state_directory.Storage(ServerConfig(0, 1, state_dir=str(tmp_path)), None)

    assert found.load_orders() == b"orders"
    assert found.recover(lambda: False) is None
    assert found.load_orders() == b""
