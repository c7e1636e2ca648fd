"""Package map, proto generation and the call to CMake; metadata lives in pyproject.toml.

HISTOSPEC_CLIENT_ONLY=1 builds a wheel of the client and the protos alone, for machines without a compiler that no wheel
fits.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
CLIENT_ONLY = os.environ.get("HISTOSPEC_CLIENT_ONLY", "0") not in ("", "0")

PACKAGES = {
    "histospec.client": "client",
    "histospec.client.core": "client/core",
    "histospec.client.doctor": "client/doctor",
    "histospec.client.engines": "client/engines",
    "histospec.client.rollouts": "client/rollouts",
    "histospec.client.sglang": "client/sglang",
    "histospec.client.transport": "client/transport",
    "histospec.client.verl": "client/verl",
    "histospec.client.vllm": "client/vllm",
    "histospec.client.vllm.asynchronous": "client/vllm/asynchronous",
    "histospec.client.vllm.choice": "client/vllm/choice",
    "histospec.client.vllm.coupled": "client/vllm/coupled",
    "histospec.client.vllm.patches": "client/vllm/patches",
    "histospec.protocol": "protos/histospec/protocol",
    "histospec.v1": "protos/histospec/v1",
}
if not CLIENT_ONLY:
    PACKAGES |= {
        "histospec.native": "native/python",
        "histospec.replay": "replay",
        "histospec.replay.recordings": "replay/recordings",
        "histospec.server": "server",
        "histospec.server.commands": "server/commands",
        "histospec.server.history": "server/history",
        "histospec.server.logs": "server/logs",
        "histospec.server.observability": "server/observability",
        "histospec.server.observability.page": "server/observability/page",  # a folder of files, without code
        "histospec.server.rpc": "server/rpc",
        "histospec.server.security": "server/security",
        "histospec.server.settings": "server/settings",
        "histospec.server.stores": "server/stores",
        "histospec.server.stores.redis": "server/stores/redis",
        "histospec.server.stores.sqlite": "server/stores/sqlite",
        "histospec.specrl": "protos/histospec/specrl",
    }
COMMAND = "histospec.client.doctor.__main__:client_only" if CLIENT_ONLY else "histospec.server.cli:main"


class BuildWithProtos(build_py):
    """Generates the proto modules beside their sources before the packages are collected."""

    def run(self):
        from grpc_tools import protoc

        protos = sorted(ROOT.glob("protos/**/*.proto"))
        scripts = Path(sys.executable).parent
        os.environ["PATH"] = f"{scripts}{os.pathsep}{os.environ['PATH']}"  # protoc looks there for its mypy plugins
        outputs = [f"--{kind}_out={ROOT / 'protos'}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        if protoc.main(["protoc", f"-I{ROOT / 'protos'}", *outputs, *map(str, protos)]) != 0:
            raise SystemExit("protoc failed")
        super().run()


class BuildWithCMake(build_ext):
    """Hands the whole C++ build to native/CMakeLists.txt."""

    def build_extension(self, ext):
        import cmake
        import ninja
        import pybind11

        # Pass all paths each time: those of an earlier isolated build are gone, and a stale cache breaks the build.
        destination = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = ROOT / "build" / f"native-{sys.implementation.cache_tag}"
        run = lambda *args: subprocess.run([str(Path(cmake.CMAKE_BIN_DIR) / "cmake"), *map(str, args)], check=True)  # noqa: E731
        run(
            "--fresh", "-G", "Ninja", "-S", ROOT / "native", "-B", build,
            f"-DCMAKE_MAKE_PROGRAM={Path(ninja.BIN_DIR) / 'ninja'}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={destination}",
            f"-DCMAKE_BUILD_TYPE={os.environ.get('HISTOSPEC_BUILD_TYPE', 'Release')}",
        )  # fmt: skip
        run("--build", build, "--target", "_core")


setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"*": ["py.typed", "*.pyi", "*.proto"], "histospec.server.observability.page": ["*"]},
    ext_modules=[] if CLIENT_ONLY else [Extension("histospec.native._core", sources=[])],
    entry_points={
        "vllm.general_plugins": ["histospec = histospec.client.vllm.patches.plugin:register"],
        "sglang.srt.plugins": ["histospec = histospec.client.sglang.plugin:register"],
        "console_scripts": [f"histospec = {COMMAND}"],
    },
    cmdclass={"build_py": BuildWithProtos, "build_ext": BuildWithCMake},
)
