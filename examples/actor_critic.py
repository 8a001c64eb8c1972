"""Balance a pole by advantage actor-critic: actor and critic are two models with two optimizers in one job. Needs no gym.

$ psd-run --shards 2 --workers 2 examples/actor_critic.py
$ psd-run --shards 2 --workers 4 --consistency ssp:2 examples/actor_critic.py

The cart and its pole move by the equations of Barto, Sutton and Anderson (1983), as in gym's CartPole. In each iteration all
workers together play 16 episodes, from which first the critic learns what a state is worth, then the actor which pushes were
better than that. So an iteration is two steps of the job, and the clock says which of the two is next. `--plain` trains without
psd, in this process, on all episodes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from command_line import CommandLine
from torch import nn

import psd_client.torch as psd

EPISODES = 16
STEPS_MAX = 200
DISCOUNT = 0.98
TURNS = ("critic", "actor")


class Played(NamedTuple):
    """All that a worker has seen in one iteration: n states.

    Attributes:
        states: (n, 4). actions: (n,), 0 or 1. returns: (n,), the discounted rewards from then on, 1 for each state.
        lengths: (episodes,).
    """

    states: torch.Tensor
    actions: torch.Tensor
    returns: torch.Tensor
    lengths: torch.Tensor


def models() -> dict[str, nn.Module]:
    """Critic: what states (n, 4) are worth, (n, 1). Actor: how much it is for pushing the cart to the right, (n, 1)."""
    torch.manual_seed(0)
    return {name: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)) for name in TURNS}


def optimizers_of(of: Mapping[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    """Each with a rule of its own."""
    return {
        "critic": torch.optim.RMSprop(of["critic"].parameters(), lr=5e-3),
        "actor": torch.optim.Adam(of["actor"].parameters(), lr=2e-2),
    }


def moved(state: torch.Tensor, force: torch.Tensor) -> torch.Tensor:
    """The states (episodes, 4) after 0.02 s: position and speed of the cart in m, angle and speed of the pole in radians."""
    speed, angle, turning = state[:, 1:].unbind(1)
    sine, cosine = angle.sin(), angle.cos()
    push = (force + 0.05 * turning.square() * sine) / 1.1
    turned = (9.8 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    change = torch.stack([speed, push - 0.05 * turned * cosine / 1.1, turning, turned], 1)
    return state + 0.02 * change


@torch.no_grad()
def play(actor: nn.Module, iteration: int, rank: int, world_size: int) -> Played:
    """A worker's share of the episodes of an iteration: the same whichever process plays them."""
    if world_size > EPISODES:
        raise ValueError(f"there are {EPISODES} episodes, and so at most {EPISODES} workers; got {world_size}")
    drawn = torch.Generator().manual_seed(iteration)
    state = torch.empty(EPISODES, 4).uniform_(-0.05, 0.05, generator=drawn)[rank::world_size]
    chances = torch.rand(STEPS_MAX, EPISODES, generator=drawn)[:, rank::world_size]
    is_up = torch.ones(len(state), dtype=torch.bool)
    seen = []
    for chance in chances:
        action = (chance < actor(state).squeeze(1).sigmoid()).float()
        seen.append((state, action, is_up))
        state = moved(state, 20 * action - 10)
        is_up = is_up & (state[:, 0].abs() < 2.4) & (state[:, 2].abs() < 0.21)
        if not is_up.any():
            break
    states, actions, are_up = map(torch.stack, zip(*seen, strict=True))
    returns = are_up.float()
    for step in range(len(seen) - 2, -1, -1):
        returns[step] += DISCOUNT * returns[step + 1]
    return Played(states[are_up], actions[are_up], returns[are_up], are_up.sum(0))


def loss_of(turn: str, of: Mapping[str, nn.Module], played: Played) -> torch.Tensor:
    """The loss by which one of the two learns."""
    worth = of["critic"](played.states).squeeze(1)
    if turn == "critic":
        return nn.functional.smooth_l1_loss(worth, played.returns)
    for_right = of["actor"](played.states).squeeze(1)
    likely = -nn.functional.binary_cross_entropy_with_logits(for_right, played.actions, reduction="none")
    return -(likely * (played.returns - worth).detach() / 10).mean()


def train(
    clock: Callable[[], int],
    of: Mapping[str, nn.Module],
    optimizers: Mapping[str, Any],
    rank: int,
    world_size: int,
    iterations: int,
    show: Callable[[int, Played], None],
) -> None:
    """Make the iterations that are left.

    Args:
        clock: says how many steps the job has made; asked before each. show: called after an iteration.
    """
    played, iteration_played = None, -1
    while (step := clock()) < 2 * iterations:
        iteration, turn = divmod(step, 2)
        if played is None or iteration_played != iteration:  # the critic's step has left the actor as it was
            played, iteration_played = play(of["actor"], iteration, rank, world_size), iteration
        optimizer = optimizers[TURNS[turn]]
        optimizer.zero_grad()
        loss_of(TURNS[turn], of, played).backward()
        optimizer.batch_size = len(played.states)  # the workers have seen more or fewer of them
        optimizer.step()
        if turn:
            show(iteration + 1, played)


def run(args: argparse.Namespace) -> None:
    """Run one worker, or all of them in this process."""
    torch.set_num_threads(1)  # these models are too small for more
    actor_critic = models()
    given = optimizers_of(actor_critic)
    recent = []

    def show(iteration: int, played: Played) -> None:
        recent.append(played.lengths.float().mean().item())
        if iteration % 10 == 0:
            steps = statistics.fmean(recent[-10:])
            print(f"iteration {iteration:3d} of {args.iterations}  steps of an episode {steps:.1f}", flush=True)

    if args.plain:
        train(itertools.count().__next__, actor_critic, given, 0, 1, args.iterations, show)
    else:
        optimizers = psd.distribute(actor_critic, given)
        ps = optimizers["actor"].ps
        if ps.clock:
            print(f"goes on with step {ps.clock + 1}", flush=True)
        shows = show if ps.rank == 0 else lambda *_: None
        train(lambda: ps.clock, actor_critic, optimizers, ps.rank, ps.world_size, args.iterations, shows)
        if ps.rank:
            return
    lengths = play(actor_critic["actor"], args.iterations, 0, 1).lengths
    result = {"iterations": args.iterations, "steps_of_an_episode": round(lengths.float().mean().item(), 2)}
    print(f"result {json.dumps(result)}", flush=True)


def main() -> None:
    """Read the command line and train."""
    parser = CommandLine("Balance a pole by advantage actor-critic.")
    parser.number("--iterations", 60, "times that episodes are played; each is two steps of the job")
    parser.add_argument("--plain", action="store_true", help="train in this process, without psd")
    parser.run(run)


if __name__ == "__main__":
    main()
