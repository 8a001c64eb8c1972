"""psd-run --on kubernetes: a job as manifests, printed or applied. Takes the manifests of deploy/ (manifests.py) and fills in
the script, the sizes and the options; kubectl.py carries it out.

A script with a relative path is on this machine, and is sent in a ConfigMap. A script with an absolute path, a module or
another command must be in the image. An option with its default value does not change the manifests.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from psd.cli.job.plan import JobPlan
from psd.cli.kubernetes import kubectl, manifests
from psd.cli.kubernetes.credentials import check_name
from psd.cli.kubernetes.manifests import Manifest
from psd.cli.words.arguments import EXIT_FAILURE, EXIT_OK, refuse_given
from psd.cli.words.logs import LOG_LEVEL
from psd.cli.words.terminal import show
from psd.contract.config import ConfigError, ServerConfig
from psd.contract.locations import has_secret, shown
from psd.contract.settings import shared_flags, text_of

SCRIPT_BYTES_MAX = 1 << 20
"""The limit of a ConfigMap."""

SCRIPT_DIR = "/etc/psd/script"

TERMINATION_SLACK_S = 20
"""Seconds beyond --grace: the shard's own five, and some for its volume."""


@dataclass(frozen=True)
class Deployment(JobPlan):
    """A job for Kubernetes; its variables are in addition to those of the manifests, and so are its restarts of each worker,
    unless they are 0.

    Attributes:
        image: container image with psd and what the script needs. name: name of the StatefulSet; all other names begin with it.
        namespace: empty: kubectl's default. script: the script to send; None: the command needs none.
        modules: files beside the script from which shards import rules.
        command: command of the workers.
        shard_flags: flags of psd-server; they are added to those of the manifests, or replace them.
        is_insecure: without certificate and tokens. is_dry: print the manifests. is_rescale: an existing job gets another size.
    """

    image: str
    name: str
    namespace: str
    script: Path | None
    modules: Sequence[Path]
    command: Sequence[str]
    shard_flags: Sequence[str]
    is_insecure: bool
    is_dry: bool
    is_rescale: bool

    def __post_init__(self) -> None:
        check_name(self.name)
        if not self.image:
            raise ConfigError("--image: expected an image with psd and whatever the script needs; see deploy/Dockerfile")
        if self.namespace and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", self.namespace):
            raise ConfigError(f"--namespace: expected at most 63 small letters, digits and hyphens, got {self.namespace!r}")
        checkpoint_dir = self.shards.checkpoint_dir
        if checkpoint_dir and "://" not in checkpoint_dir:
            raise ConfigError(
                f"--checkpoint-dir: {checkpoint_dir!r} would be a different place in each pod; expected a URL that all "
                "shards reach, such as s3://bucket/run-7"
            )
        check_no_secret("--checkpoint-dir", checkpoint_dir)
        if self.is_rescale and not checkpoint_dir:
            raise ConfigError("--rescale: needs --checkpoint-dir; the new shards start from a checkpoint")

    def run(self, cluster: kubectl.Kubectl | None = None) -> int:
        """Print the manifests, or apply them to a cluster (default: kubectl's own); return the exit status."""
        try:
            rendered = self.render()
            if self.is_dry:
                print(manifests.as_yaml(rendered), end="")
            else:
                kubectl.deploy(
                    rendered,
                    cluster or kubectl.Kubectl(self.namespace),
                    name=self.name,
                    shards=self.places.shards,
                    checkpoint_dir=self.shards.checkpoint_dir,
                    is_rescale=self.is_rescale,
                    needs_credentials=not self.is_insecure,
                )
        except ConfigError as error:
            show(f"psd-run: error: {error}", is_error=True)
            return EXIT_FAILURE
        return EXIT_OK

    def render(self) -> list[Manifest]:
        """The manifests, in the order in which to apply them.

        Raises:
            ConfigError: the script cannot be read or sent; PyYAML is not installed.
        """
        rendered = manifests.named(manifests.load(is_insecure=self.is_insecure), self.name, self.namespace)
        manifests.set_sizes(rendered, self.places.shards, sum(self.places.workers))
        config, stateful_set, job = (manifests.the(kind, rendered) for kind in ("ConfigMap", "StatefulSet", "Job"))
        config["data"]["CHECKPOINT_DIR"] = self.shards.checkpoint_dir
        config["data"]["CHECKPOINT_SECS"] = text_of(self.shards.checkpoint_secs)

        shard, worker = manifests.container(stateful_set), manifests.container(job)
        shard["image"] = worker["image"] = self.image
        given = {flag.partition("=")[0] for flag in self.shard_flags}
        kept = [flag for flag in shard["args"] if flag.partition("=")[0] not in given]
        shard["args"] = [*kept, *(_escaped(flag) for flag in self.shard_flags)]
        if self.shards.grace_s != ServerConfig(0, 1).grace_s:
            ends_within_s = int(self.shards.grace_s) + TERMINATION_SLACK_S
            stateful_set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = ends_within_s

        worker["command"] = [_escaped(part) for part in self.command]
        for pod, environ in ((shard, self.shard_environ), (worker, self.for_workers)):
            for name, value in environ.items():
                manifests.set_variable(pod, name, _escaped(value))
        if self.restarts_max:
            job["spec"]["backoffLimitPerIndex"] = self.restarts_max
        if self.script is None:
            return rendered
        return [
            self._send([*dict.fromkeys([self.script, *self.modules])], config, [job, stateful_set] if self.modules else [job]),
            *rendered,
        ]

    def _send(self, files: Sequence[Path], config: Manifest, owners: Sequence[Manifest]) -> Manifest:
        """A ConfigMap with the script and its modules, mounted as files in the owners' containers."""
        name = f"{self.name}-script"
        for owner in owners:
            mount = {"name": "script", "mountPath": SCRIPT_DIR, "readOnly": True}
            manifests.container(owner)["volumeMounts"].append(mount)
            owner["spec"]["template"]["spec"]["volumes"].append({"name": "script", "configMap": {"name": name}})
        metadata = {**config["metadata"], "name": name}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": _texts(files)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add psd-run's options for clusters."""
    group = parser.add_argument_group("on Kubernetes")
    group.add_argument("--image", metavar="IMAGE", help="image of shards and workers, with psd in it (see deploy/Dockerfile)")
    group.add_argument(
        "--name", metavar="NAME", help=f"name of the job, and of all that belongs to it (default: {manifests.NAME})"
    )
    group.add_argument("--namespace", metavar="NS", help="where the job runs (default: kubectl's)")
    group.add_argument(
        "--insecure", action="store_true", help="do without certificates and tokens, on a cluster or a network of your own"
    )
    group.add_argument("--dry-run", action="store_true", help="only print the manifests")
    group.add_argument(
        "--rescale",
        action="store_true",
        help="change the number of shards of the running job of this name to --shards: take a checkpoint, remove its workers "
        "and shards, and start again from the checkpoint; needs --checkpoint-dir",
    )


_IN_MANIFESTS = ("checkpoint_dir", "checkpoint_secs", "exit_when_done")
"""Settings of shards that have their own place in the manifests."""

_FOR_CLUSTERS = ("image", "name", "namespace", "dry_run", "rescale")
_FOR_ONE_MACHINE = {
    "state_dir": "the shards' state is on persistent volumes",
    "metrics_port": "metrics are on port 7002",
    "nnodes": "the cluster finds the hosts",
    "hosts": "the cluster finds the hosts",
    "rendezvous": "the cluster finds the hosts",
    "tls_cert": "certificates and tokens are secrets of the cluster",
    "token_file": "certificates and tokens are secrets of the cluster",
    "log_dir": "kubectl logs has the output of each pod",
    "tensorboard": "use --env PSD_TENSORBOARD=DIR, a directory of the pod that outlives it",
    "max_shard_restarts": "Kubernetes restarts shards without limit",
}


def check_absent(args: argparse.Namespace) -> None:
    """Raise ConfigError if an option for clusters is given without --on."""
    refuse_given(args, dict.fromkeys(_FOR_CLUSTERS, "is for --on kubernetes"))


def deployment(args: argparse.Namespace, job: JobPlan) -> Deployment:
    """The job that psd-run's options describe.

    Raises:
        ConfigError: an option does not go together with --on kubernetes, or is wrong.
    """
    refuse_given(args, _FOR_ONE_MACHINE, "not with --on kubernetes, where ")
    if args.transport == "shm":
        raise ConfigError("--transport: shm is for one machine; on Kubernetes each pod is a machine of its own")
    words = job.words
    script, command = worker_command(words)
    modules = _modules(script, args.rules) if script is not None else []
    folder = SCRIPT_DIR if modules else str(PurePosixPath(words[0]).parent) if words[0].endswith(".py") and not script else ""
    rule_dir = [f"--rule-dir={folder}"] if args.rules and folder else []
    _check_beginning(args.from_checkpoint)
    log_level = [f"--log-level={args.log_level}"] if args.log_level != LOG_LEVEL else []
    return Deployment(
        **vars(job),
        image=args.image or "",
        name=args.name or manifests.NAME,
        namespace=args.namespace or "",
        script=script,
        modules=modules,
        command=command,
        shard_flags=[*shared_flags(job.shards, but=_IN_MANIFESTS), *rule_dir, *log_level],
        is_insecure=args.insecure,
        is_dry=args.dry_run,
        is_rescale=args.rescale,
    )


def _check_beginning(url: str) -> None:
    """Raise ConfigError if pods could not reach the checkpoint with which a new job begins."""
    if url and "://" not in url:
        raise ConfigError(f"--from-checkpoint: {url!r} would be a different place in each pod; expected a URL that all reach")
    check_no_secret("--from-checkpoint", url)


def check_no_secret(option: str, url: str) -> None:
    """Raise ConfigError for a URL with a secret: it would be in the manifests, where everybody could read it."""
    if has_secret(url):
        raise ConfigError(
            f"{option}: {shown(url)} is given with a password or key, which everybody could read in the manifests; give it "
            "to the pods in a Secret, such as AWS_SECRET_ACCESS_KEY or FSSPEC_SFTP_PASSWORD in the shards' environment"
        )


def worker_command(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The script to send, if any, and the command of the workers.

    Raises:
        ConfigError: there is no such script here.
    """
    if words[0] == "-m":
        return None, ["python", "-u", *words]
    if not words[0].endswith(".py"):
        return None, list(words)
    if PurePosixPath(words[0]).is_absolute():
        return None, ["python", "-u", *words]
    path = Path(words[0])
    if not path.is_file():
        raise ConfigError(f"there is no script {words[0]!r} here; for a script in the image give its absolute path")
    if not re.fullmatch(r"[-._A-Za-z0-9]+", path.name):
        raise ConfigError(f"the script's name can have letters, digits, hyphens, dots and underscores, got {path.name!r}")
    return path, ["python", "-u", f"{SCRIPT_DIR}/{path.name}", *words[1:]]


def _modules(script: Path, rules: Sequence[str]) -> list[Path]:
    """The modules of rules that are beside the script; others must be in the image."""
    found = (script.with_name(f"{rule.partition(':')[0]}.py") for rule in dict.fromkeys(rules))
    return [path for path in dict.fromkeys(found) if path.is_file()]


def _texts(files: Sequence[Path]) -> dict[str, str]:
    """Texts of the script and its modules, by name."""
    texts = {}
    for path in files:
        try:
            texts[path.name] = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the script {path}: {error}") from error
    nbytes = sum(len(text.encode()) for text in texts.values())
    if nbytes > SCRIPT_BYTES_MAX - 4096:
        raise ConfigError(
            f"the script {files[0]} has {nbytes} bytes{', with its rules' if files[1:] else ''}, and Kubernetes sends at most "
            "1 MiB in a ConfigMap; put it into the image, and give its absolute path there"
        )
    return texts


def _escaped(text: str) -> str:
    """Escape $(NAME), which Kubernetes would expand in commands and values."""
    return text.replace("$(", "$$(")
