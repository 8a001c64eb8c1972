"""The build steps that pyproject.toml cannot express: extension modules, C headers generated from psd_core/rules.py and
vector_operations.py, protobuf code generated from proto/.

Every way of building runs all: `pip install .`, `pip install -e .`, wheels. Neither generated C nor generated protobuf
modules are committed; protobuf modules are written into psd/v1/ of the source tree, where an editable install needs them.

PSD_CYTHON_DEBUG=1 builds the extensions with Cython's bounds checks and with symbols, unoptimised. PSD_KERNELS=built takes
those that are in the source tree as they are, for a further environment of the same Python: .ci/setup says when.
"""

import importlib
import os
import sys
from importlib.resources import files
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CSRC = ROOT / "psd_core/csrc"
PROTOS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "proto").glob("psd/v1/*.proto"))
DEBUG = os.environ.get("PSD_CYTHON_DEBUG", "0") not in ("", "0")

# No -march=native: a wheel must run elsewhere; kernels choose their instruction set when loaded. No -ffast-math: it deletes
# NaN checks. No contraction: a multiply-add rounds twice on every machine, so that results are the same bits on all.
# Nobody reads errno or the floating-point flags: roots and choices between two numbers then vectorise, with the same results.
# No -g, which Python's own flags have: symbols for debuggers would be four fifths of the wheel.
COMPILE_ARGS = ["-O3", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-g0"]
LINK_ARGS = ["-Wl,--strip-all"] if sys.platform == "linux" else []
if DEBUG:
    COMPILE_ARGS += ["-O0", "-g"]
    LINK_ARGS = []

# psd_core itself cannot be imported before its kernels are built; these modules of it can.
sys.modules["psd_core"] = ModuleType("psd_core")
sys.modules["psd_core"].__path__ = [str(ROOT / "psd_core")]
headers = importlib.import_module("psd_core._c_headers")

HEADERS = sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("*.h"))
HOW = {"include_dirs": ["psd_core/csrc"], "extra_compile_args": COMPILE_ARGS, "extra_link_args": LINK_ARGS}
WITH_RULES = {
    **HOW,
    "depends": HEADERS,
    "define_macros": [("PSD_RULES_CHECKSUM", f"{headers.checksum()}u")],
    "libraries": ["m"],
}
TABLES = sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("table*.c"))
CODECS = sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("codec*.c"))
VECTORS = sorted(path.relative_to(ROOT).as_posix() for path in CSRC.glob("vector*.c"))

# Compiled once, and linked into each extension that calls them.
SHARED = [f"psd_core/csrc/{name}.c" for name in ("half", "kernels", "kernels_f32", "kernels_f64", "content", "ranks")]
WITH_SHARED = {**WITH_RULES, "libraries": ["psd_kernels", "m"]}
LIBRARY = {
    "sources": SHARED,
    "obj_deps": {"": HEADERS},
    "include_dirs": HOW["include_dirs"],
    "macros": WITH_RULES["define_macros"],
    "cflags": COMPILE_ARGS,
}

KERNELS_HOW = {**WITH_SHARED, "depends": [*HEADERS, "psd_core/_kernels_c.pxd"]}
kernels = Extension("psd_core._kernels", sources=["psd_core/_kernels.pyx"], **KERNELS_HOW)
DECLARED = ("_kernels_c", "_block_c", "_block", "_ranks", "_steps_c", "_table_c", "_table", "_tables_c", "_tables")
BLOCK_DEPENDS = [*HEADERS, *(f"psd_core/{name}.pxd" for name in DECLARED)]
BLOCK_HOW = {**WITH_SHARED, "depends": BLOCK_DEPENDS}
BLOCKS = [f"psd_core/csrc/{name}.c" for name in ("block", "block_pages")]
block = Extension("psd_core._block", sources=["psd_core/_block.pyx", *BLOCKS], **BLOCK_HOW)
ranks = Extension("psd_core._ranks", sources=["psd_core/_ranks.pyx"], **BLOCK_HOW)
STEPS = [f"psd_core/csrc/{name}.c" for name in ("steps", "step_loop")]
steps = Extension("psd_core._steps", sources=["psd_core/_steps.pyx", *STEPS], **BLOCK_HOW)
worker_steps = Extension(
    "psd_core._worker_steps", sources=["psd_core/_worker_steps.pyx", "psd_core/csrc/worker_steps.c"], **KERNELS_HOW
)
arena = Extension("psd_core._arena", sources=["psd_core/_arena.pyx"], **WITH_SHARED)
table = Extension("psd_core._table", sources=["psd_core/_table.pyx", *TABLES], **BLOCK_HOW)
tables = Extension("psd_core._tables", sources=["psd_core/_tables.pyx", "psd_core/csrc/step_tables.c"], **BLOCK_HOW)
distinct = Extension(
    "psd_core._distinct", sources=["psd_core/_distinct.pyx", "psd_core/csrc/distinct.c"], depends=HEADERS, **HOW
)
vector = Extension("psd_core._vector", sources=["psd_core/_vector.pyx", *VECTORS], **WITH_SHARED)
codecs = Extension("psd_core._codecs", sources=["psd_core/_codecs.pyx", *CODECS], depends=HEADERS, **HOW)
deltas = Extension("psd_core._deltas", sources=["psd_core/_deltas.pyx", "psd_core/csrc/delta.c"], depends=HEADERS, **HOW)
EXTENSIONS = [kernels, block, ranks, steps, worker_steps, arena, table, tables, distinct, vector, codecs, deltas]
directives = {
    "language_level": "3",
    "boundscheck": DEBUG,
    "wraparound": DEBUG,
    "initializedcheck": DEBUG,
    "cdivision": not DEBUG,
}
for extension in EXTENSIONS:
    extension.cython_directives = directives


class BuildClibWithHeaders(build_clib):
    """build_clib that first writes the headers that the kernels include."""

    def run(self) -> None:
        for name, text in headers.c_headers().items():
            (CSRC / name).write_text(text)
        super().run()


class BuildExtWithKernels(build_ext):
    """build_ext that first compiles the kernels, if nobody has; `build_ext --inplace` alone does not."""

    def run(self) -> None:
        self.run_command("build_clib")
        super().run()


class BuildPyWithProtobuf(build_py):
    """build_py that first generates psd/v1/*_pb2*.py and .pyi."""

    def run(self) -> None:
        generate_protobuf()
        self.__dict__.pop("data_files", None)  # listed before the .pyi files existed
        super().run()

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *PROTOS]  # for the sdist


def generate_protobuf() -> None:
    from grpc_tools import protoc

    # Well-known types (google/protobuf/*.proto) lie beside the compiler.
    status = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--python_out={ROOT}",
            f"--pyi_out={ROOT}",
            f"--grpc_python_out={ROOT}",
            *(str(ROOT / proto) for proto in PROTOS),
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")


ARE_BUILT = os.environ.get("PSD_KERNELS") == "built"
# Never reuse objects that were built with other flags.
BUILD_EXT = {"force": True, "parallel": os.cpu_count() or 1}
setup(
    libraries=[] if ARE_BUILT else [("psd_kernels", LIBRARY)],
    ext_modules=[] if ARE_BUILT else EXTENSIONS,
    cmdclass={"build_clib": BuildClibWithHeaders, "build_ext": BuildExtWithKernels, "build_py": BuildPyWithProtobuf},
    options={"build_clib": {"force": True}, "build_ext": BUILD_EXT},
)
