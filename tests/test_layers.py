"""The layers of the design, as a test: imports point down only, and a few things are imported in few places."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter

import pytest
from source_tree import imports, is_within, modules, tree

# Each layer, and what of the project it may import beside itself. psd itself holds only the version.
LAYERS = {
    "psd_core": (),
    "psd.contract": ("psd.v1", "psd_core"),
    "psd.checkpoint": ("psd.contract", "psd.v1", "psd_core"),
    "psd.state": ("psd.checkpoint", "psd.contract", "psd.v1", "psd_core"),
    "psd.rim": ("psd.state", "psd.checkpoint", "psd.contract", "psd.v1"),
    "psd.watch": ("psd.contract", "psd.v1"),
    "psd.relay": ("psd.rim", "psd.state", "psd_client", "psd.contract", "psd.v1", "psd_core"),
    "psd.cli": ("psd.watch", "psd.relay", "psd.rim", "psd.state", "psd.checkpoint", "psd.contract", "psd.v1", "psd_core"),
    "psd.cli.follow": ("psd.cli", "psd_client", "psd.checkpoint", "psd.contract"),
    "psd_client": ("psd.contract", "psd.v1", "psd_core"),
    "psd_client.lanes": ("psd.contract", "psd.v1", "psd_core"),
    "psd_client.worker": ("psd_client.lanes", "psd.contract", "psd.v1", "psd_core"),
    "psd.v1": ("psd_core",),
    "psd.ray": ("psd.cli",),
    "psd": (),
}

# What is not the project's own: who may import it.
OUTSIDE = {
    "grpc": (
        "psd.rim",
        "psd.relay",
        "psd.cli.ctl.shard_calls",
        "psd.watch.asking",
        "psd_client.lanes.grpc_channel",
        "psd_client.lanes.grpc_errors",
    ),
    "ray": ("psd.cli.ray.shards", "psd.cli.ray.job"),
    "grpc_health": ("psd.rim", "psd.relay"),
    "grpc_reflection": ("psd.rim",),
    "prometheus_client": ("psd.rim.metrics", "psd.relay.metrics"),
    "http": (),
    "torch": (
        "psd_client.torch",
        "psd_client.integrations",
        "psd_client.torch.declaration",
        "psd_client.torch.embedding",
        "psd_client.torch.gradients",
        "psd_client.torch.groups",
        "psd_client.torch.parameters",
        "psd_client.torch.places",
        "psd_client.torch.row_gradients",
        "psd_client.torch.schedule",
        "psd_client.torch.tables",
        "psd_client.torchrec",
        "psd_client.keras.on_torch",
    ),
    "torchrec": (),  # its features are told by what they are
    "tensorflow": ("psd_client.keras.on_tensorflow",),
    "keras": ("psd_client.keras", "psd_client.keras.embedding"),
    "jax": ("psd_client.jax",),
    "argparse": ("psd.cli",),
    "socket": (
        "psd.cli",
        "psd.watch.dashboard.server",
        "psd.watch.dashboard.visitors",
        "psd.rim",
        "psd_client",
        "psd.contract.wire",
        "psd.contract.strands",
        "psd.contract.loopback",
        "psd.contract.tls",
        "psd.contract.tls_socket",
    ),
    "socketserver": ("psd.rim",),
    "ssl": (
        "psd.rim",
        "psd.watch.dashboard.server",
        "psd.watch.dashboard.visitors",
        "psd_client",
        "psd.contract.tls",
        "psd.contract.tls_socket",
        "psd.contract.credentials",
        "psd.cli.hosts.leader",  # between the psd-runs of several hosts
        "psd.cli.hosts.link",
        "psd.cli.hosts.rendezvous",
    ),
    "asyncio": ("psd.watch.dashboard", "psd.cli.ctl.dashboard", "psd.rim.metrics_server"),
    "aiohttp": ("psd.watch.dashboard",),
    "multiprocessing": ("psd_client",),
    "subprocess": ("psd.cli", "psd_client.owned"),
    "signal": ("psd.cli", "psd.watch.dashboard.server", "psd_client", "psd.contract.environment"),
    # What runs code that is in its input. torch.load: see test_tidy.py.
    "pickle": (),
    "marshal": (),
    "shelve": (),
    "dill": (),
    # Between a program and the processes that it has started, over pipes that nobody else has.
    "cloudpickle": ("psd_client.local", "psd_client.local_worker"),
    "joblib": (),
    "fsspec": ("psd.checkpoint",),
    "yaml": ("psd.cli.kubernetes.manifests",),
    "textual": ("psd.watch.top.app",),
    "rich": ("psd.watch.top.app",),
    "matplotlib": ("psd.cli.ctl.plot",),
}

ROOMS = tuple(f"psd.cli.{room}" for room in ("ctl", "follow", "hosts", "job", "kubernetes", "processes", "ray", "words"))

CLIENTS = ("psd.cli.follow.follower", "psd.cli.follow.ending", "psd.relay")
"""Parts of psd's commands that are clients of a job; loaded where they are asked for."""

ENVIRONMENT = ("psd.contract.environment", "psd.cli")


def layer_of(module):
    """The layer that a module belongs to; the longest name wins."""
    return max((layer for layer in LAYERS if is_within(module, layer)), key=len)


def test_every_package_has_a_layer():
    """A new package must say where it belongs."""
    packages = {name.rpartition(".")[0] or name for name in modules()}

    assert {p for p in packages if layer_of(p) == "psd"} <= {"psd"}, "add the package to LAYERS"


def test_imports_point_down():
    """No module imports from a layer above its own, or beside it, not even lazily or for types."""
    up = [
        f"{i.importer}:{i.line} imports {i.module}"
        for i in imports()
        if is_within(i.module, "psd", "psd_core", "psd_client")
        and not is_within(i.module, layer_of(i.importer))
        and i.module != "psd"
        and not is_within(i.module, *LAYERS[layer_of(i.importer)])
    ]

    assert up == []


@pytest.mark.parametrize("library", OUTSIDE)
def test_a_library_is_imported_only_where_it_belongs(library):
    """gRPC stays in the rim, frameworks in their own faces, sockets and flags out of state and contract."""
    wrong = [
        f"{i.importer}:{i.line}"
        for i in imports()
        if is_within(i.module, library) and not is_within(i.importer, *OUTSIDE[library])
    ]

    assert wrong == []


def test_modules_do_not_import_in_circles():
    """Inside a layer, too, imports form no circle, those for types alone included."""
    known = modules()
    graph = {name: set() for name in known}
    for i in imports():
        # A package imports its parts and is imported before them; that is no circle.
        if i.module in known and not is_within(i.importer, i.module):
            graph[i.importer].add(i.module)

    order = list(graphlib.TopologicalSorter(graph).static_order())

    assert set(order) >= set(known)


def test_folders_do_not_import_in_circles():
    """In each folder, its files and the folders in it import each other in one direction: one can be read after the other.

    What of psd is a client stands above both, wherever it lies.
    """
    known = modules()
    graphs = {}
    for i in imports():
        importer, module = i.importer.split("."), i.module.split(".")
        shared = next((n for n, (a, b) in enumerate(zip(importer, module, strict=False)) if a != b), None)
        if is_within(i.importer, *CLIENTS) and is_within(i.module, "psd_client"):
            continue
        if i.module in known and shared is not None:  # else one of them is a package, and the other lies in it
            folder = graphs.setdefault(tuple(importer[:shared]), {})
            folder.setdefault(importer[shared], set()).add(module[shared])

    for graph in graphs.values():
        list(graphlib.TopologicalSorter(graph).static_order())

    assert {("psd", "state"), ("psd", "cli"), ("psd_client", "worker")} <= set(graphs)


def test_the_parts_of_a_shard_do_not_know_it():
    """A desk speaks for the whole shard; what it asks does not know the shard, nor who asks."""
    parts = [f"psd.state.{folder}" for folder in ("aggregation", "durability", "tables", "workers")]
    whole = [f"psd.state.{name}" for name in ("shard", "desks", "cuts", "core", "job")]

    assert [f"{i.importer}:{i.line}" for i in imports() if is_within(i.importer, *parts) and is_within(i.module, *whole)] == []


def test_rooms_of_the_command_line_do_not_import_its_doors():
    """The commands are on top: what belongs to one of them alone may stay in its file, since nobody else needs it."""
    doors = {name for name in modules() if is_within(name, "psd.cli") and name.count(".") == 2} - set(ROOMS)
    back = [f"{i.importer}:{i.line}" for i in imports() if is_within(i.importer, *ROOMS) and i.module in doors]

    assert doors
    assert back == []


def test_a_class_has_a_name_of_its_own():
    """Who reads a name knows which class it is. The faces of frameworks share three names that their users expect."""
    names = Counter(
        node.name
        for module, path in modules().items()
        for node in tree(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not is_within(module, "psd.v1")
    )

    shared = [name for name, count in names.items() if count > 1]
    assert sorted(shared) == ["DistributedOptimizer", "Embedding", "EmbeddingCollection"]


def test_the_environment_is_read_in_one_place():
    """os.environ and os.getenv appear in psd/contract/environment.py and in the command line, nowhere else."""
    wrong = [
        f"{name}:{node.lineno}"
        for name, path in modules().items()
        if not is_within(name, *ENVIRONMENT)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "putenv")
    ]

    assert wrong == []


def test_servers_start_without_a_framework():
    """Nothing that a server imports leads to torch, tensorflow or the client; but what is a client, once asked for, does."""
    known = modules()
    reached, todo = set(), ["psd.cli.server", "psd.cli.run", "psd.cli.psdctl"]
    while todo:
        name = todo.pop()
        if name not in reached and name in known:
            reached.add(name)
            found = [i for i in imports() if i.importer == name]
            assert [i for i in found if is_within(i.module, *CLIENTS) and not i.is_lazy] == []
            todo += [i.module for i in found if not is_within(i.module, *CLIENTS)]

    assert len(reached) > 20
    assert not [name for name in reached if is_within(name, "psd_client")]


def test_the_core_of_a_shard_is_private_to_its_state():
    """What others want of a shard they ask the `Shard` for."""
    outside = {name: path for name, path in modules().items() if is_within(name, "psd.rim", "psd.cli")}
    touched = [
        f"{name}:{node.lineno}"
        for name, path in outside.items()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("core", "_core")
    ]
    imported = [
        f"{i.importer}:{i.line}"
        for i in imports()
        if is_within(i.module, "psd.state.core") and not is_within(i.importer, "psd.state")
    ]

    assert (touched, imported) == ([], [])


@pytest.mark.process
def test_what_only_starts_processes_loads_no_numpy():
    """psd-run and its watchdog begin in half the time."""
    loaded = (
        "import sys, psd.cli.run, psd.cli.processes.watchdog; print(sorted({'numpy', 'grpc', 'torch'} & sys.modules.keys()))"
    )

    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "[]\n"
