"""A host's part in a job that another host leads: starts processes of its own command when the leader says so.

    join -> nonce -> hello -> welcome, begin -> ready; then start, signal, tell -> output, exit; until end

When the connection ends, for any reason, it ends all processes here, since nobody else would: a job cannot go on without its
leader. The other side is psd/cli/hosts/leader.py; psd/cli/agent.py starts this side over ssh.
"""

from __future__ import annotations

import functools
import selectors
import signal
import socket
import time
from collections.abc import Callable, Sequence

import psd
from psd.cli.hosts.link import FLUSH_S, Message, NodeLink
from psd.cli.hosts.proof import new_nonce, proof_of, what_is_wrong
from psd.cli.job.actions import Name
from psd.cli.job.plan import HostPlan
from psd.cli.job.policy import SHARDS_SLACK_S
from psd.cli.processes.host_processes import HostProcesses
from psd.cli.processes.state_directories import is_run_id
from psd.cli.processes.wakeup_pipe import Wakeups
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_HOST_LOST, EXIT_OK, signal_name
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError
from psd.contract.job_records import JobEntry
from psd.contract.printable import printable


class Follower:
    """A node of a job, other than the leader.

    Args:
        plan: the plan from this host's own command line. replan: makes it again, for a run id and a node.
        link: connection to the leader. address: address of this machine, for the other hosts.
    """

    def __init__(self, plan: HostPlan, replan: Callable[[str, int], HostPlan], link: NodeLink, address: str) -> None:
        assert plan.meeting is not None
        self._plan, self._replan = plan, replan
        self._meeting = plan.meeting
        self._link, self._address = link, address
        self._nonce = new_nonce()
        self._leaders_proof: str | None = None  # the one that it must show
        self._is_welcome = False
        self._selector, self._urgent = selectors.DefaultSelector(), selectors.DefaultSelector()
        self._processes: HostProcesses | None = None
        self._entry: JobEntry | None = None
        self._status: int | None = None
        self._signals = 0

    def run(self, wakeups: Wakeups, messages: Sequence[Message] = ()) -> int:
        """Take part until the job ends; return its status. Signals are passed to the leader. messages: received before."""
        for selector in (self._selector, self._urgent):
            selector.register(wakeups, selectors.EVENT_READ, functools.partial(self._read_signals, wakeups))
            selector.register(self._link.reader, selectors.EVENT_READ, self._receive)
        self._link.send({"join": psd.__version__})
        for message in messages:
            self._handle(message)
        try:
            while self._status is None:
                self._wait()
        finally:
            if self._entry is not None:
                self._entry.remove()
            if self._processes is not None:
                self._processes.clear_away(keep=self._status != EXIT_OK)
            self._link.flush()
            self._selector.close()
            self._urgent.close()
        assert self._status is not None
        return self._status

    def _wait(self) -> None:
        # Where the leader does not take the output, the processes must wait, as for a full pipe; signals and the leader's words
        # need not.
        selector = self._urgent if self._link.is_crowded else self._selector
        due = time.monotonic() + FLUSH_S if self._link.has_unsent else self._link.beat_at()
        for key, _ in selector.select(max(0.0, due - time.monotonic())):
            key.data()
        self._link.flush()
        if self._status is None and not self._link.beat(time.monotonic()):
            self._give_up("the psd-run that leads the job has been silent for too long", EXIT_HOST_LOST)

    def _receive(self) -> None:
        messages = self._link.receive()
        for message in messages or []:
            if self._status is not None:
                return
            try:
                self._handle(message)
            except (KeyError, TypeError, ValueError, OverflowError):
                self._give_up("error: what the psd-run that leads the job says makes no sense")
        if messages is not None or self._status is not None:
            return
        if self._leaders_proof is None and not self._meeting.hosts:
            hint = "" if self._meeting.tls else "; if it has --tls-cert and --tls-key, they must be given here, too"
            self._give_up(
                f"error: {self._meeting.rendezvous} has ended the connection at once: is it the psd-run of node 0?{hint}"
            )
        else:
            self._give_up("the connection to the psd-run that leads the job has ended", EXIT_HOST_LOST)

    def _handle(self, message: Message) -> None:
        if "refused" in message:
            self._fail(f"this host was refused: {printable(message['refused'])}")
        elif "end" in message:
            self._status = int(message["end"])
            self._remark("all workers have finished" if self._status == 0 else f"the job has ended with status {self._status}")
        elif not self._is_welcome:
            self._introduce(message)
        elif "start" in message:
            name, addresses = self._name(message["start"]), message["addresses"]
            self._running.start(name, addresses)
            if name.kind == "worker" and self._entry is None:  # a shard hears of no addresses but its own
                self._list(addresses)
        elif "tell" in message:
            self._running.tell(self._name(message["tell"]), str(message["line"]))
        elif "signal" in message:
            self._running.signal(self._name(message["signal"]), signal.Signals(message["signum"]))
        elif "begin" in message:
            run_id, node = message["begin"], message["node"]
            if self._processes is not None or not is_run_id(run_id) or node not in range(self._plan.places.nodes):
                raise ValueError(f"node {node} of run {run_id} cannot begin")
            self._begin(self._replan(run_id, node))

    @property
    def _running(self) -> HostProcesses:
        """The processes of this host. Raises ValueError before the job has begun."""
        if self._processes is None:
            raise ValueError("the job has not begun")
        return self._processes

    def _name(self, given: Sequence[object]) -> Name:
        """Name of a process of this host. Raises ValueError if it belongs to another host."""
        kind, number = given
        name = Name(str(kind), int(str(number)))
        if name not in self._plan.places.names(self._plan.node):
            raise ValueError(f"{name} is not a process of node {self._plan.node}")
        return name

    def _introduce(self, message: Message) -> None:
        """Prove to the leader who this host is, and check the leader's proof. Before that, no other message is obeyed."""
        key = self._meeting.key
        if "nonce" in message:
            self._leaders_proof = proof_of(key, "leader", message["nonce"], self._nonce)
            hello = {
                "nonce": self._nonce,
                "proof": proof_of(key, "node", message["nonce"], self._nonce),
                "alike": dict(self._meeting.alike),
                "node": self._meeting.node,
                "host": socket.gethostname(),
                "address": self._address,
                "kept": self._plan.kept_run_id,
            }
            self._link.send({"hello": hello})
        elif "welcome" in message and self._leaders_proof is not None:
            wrong = what_is_wrong(self._leaders_proof, str(message["welcome"]))
            self._is_welcome = not wrong
            if wrong:
                self._fail(f"the psd-run that leads the job is not to be trusted: {wrong}")

    def _fail(self, why: str) -> None:
        _say(f"error: {why}")
        self._status = EXIT_FAILURE

    def _begin(self, plan: HostPlan) -> None:
        self._plan = plan
        self._remark(f"this host is node {plan.node} of {plan.places.nodes} of run {plan.run_id}; node 0 shows all output")
        try:
            self._processes = HostProcesses(
                plan,
                self._address,
                self._selector,
                on_output=lambda name, data: self._tell(name, "output", data=data.decode("latin-1")) if data else None,
                on_exit=lambda name, returncode: self._tell(name, "exit", status=returncode),
                say=lambda text: self._link.send({"say": text}),
            )
        except ConfigError as error:
            self._link.send({"failed": str(error)})
            self._fail(str(error))
        else:
            self._link.send({"ready": True})

    def _list(self, servers: Sequence[str]) -> None:
        """Have psdctl find the job on this host, too."""
        try:
            self._entry = JobEntry(self._plan.record(servers))
        except OSError as error:
            self._remark(f"psdctl jobs will not list this job here: {error.strerror or error}")

    def _tell(self, name: Name, what: str, **more: object) -> None:
        self._link.send({what: [name.kind, name.number], **more})

    def _read_signals(self, wakeups: Wakeups) -> None:
        for signum in wakeups.read():
            if signum != signal.SIGCHLD:
                self._remark(f"{signal_name(signum)}: telling the psd-run that leads the job")
                self._signals += 1
                self._link.send({"told": signum, "count": self._signals})
        if self._processes is not None:
            self._processes.reap()

    def _remark(self, text: str) -> None:
        """Tell the user who started psd-run on this host. Over ssh that is the leader, which knows already."""
        if not self._meeting.hosts:
            _say(text)

    def _give_up(self, why: str, status: int = EXIT_FAILURE) -> None:
        """End all processes here in order, because there is no leader any more. status: used if the job has begun."""
        self._status = status if self._processes is not None else EXIT_FAILURE
        living = self._processes.living if self._processes is not None else []
        _say(f"{why}; ending {len(living)} processes here" if living else why)
        if self._processes is None:
            return
        for name in living:
            self._processes.signal(name, signal.SIGTERM)
        self._selector.unregister(self._link.reader)
        end_by = time.monotonic() + self._plan.shards.grace_s + SHARDS_SLACK_S
        while self._processes.living and time.monotonic() < end_by:
            for key, _ in self._selector.select(FLUSH_S):
                key.data()
            self._processes.reap()


def _say(text: str) -> None:
    show(f"[psd-run] {text}", is_error=True)
