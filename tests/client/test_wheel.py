"""The client-only wheel: built without a compiler, small, and importable beside the packages of trainers' images."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.support.servers import Server

ROOT = Path(__file__).parents[2]

ROUND_TRIP = """
import google.protobuf, sys
assert google.protobuf.__version__.startswith(sys.argv[1]), google.protobuf.__version__
from histospec.v1 import draft_pb2 as pb
message = pb.DraftRequest(step=pb.Step(tokens=b"\\1\\0\\0\\0"), closes=[pb.CloseSession(session=1, epoch=3)])
assert pb.DraftRequest.FromString(message.SerializeToString()) == message
from histospec.client import DraftClient
client = DraftClient("127.0.0.1:9", "run", deadline=0.01)
assert not len(client.step(client.open([[1, 2]]), [[3]])[0])
assert "histospec.server" not in sys.modules
print(pb.__file__)
"""


def run(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, with compilers that only fail."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "tests", "*.so", "*_pb2*", "__pycache__", ".*_cache", "demo"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    environment = os.environ | {"HISTOSPEC_CLIENT_ONLY": "1", "CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(directory), str(source)]
    run(*command, env=environment)
    (built,) = directory.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A fresh environment with the wheel and what it asks for; its Python."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False)
    python = directory / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", str(wheel))
    return python


def test_wheel_is_pure_and_holds_the_client_alone(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    files = [Path(name) for name in archive.namelist()]
    code = [f for f in files if not f.parts[0].endswith(".dist-info")]
    assert {f.parts[:2] for f in code} == {("histospec", "client"), ("histospec", "protocol"), ("histospec", "v1")}
    assert {"LICENSE", "NOTICE"} <= {f.name for f in files}
    assert {f.suffix for f in code} == {".py", ".pyi", ".typed", ".proto"}
    assert {"draft_pb2.py", "draft_pb2_grpc.py", "draft_pb2.pyi"} <= {f.name for f in code}
    assert {p.parent.relative_to(ROOT / "client") for p in (ROOT / "client").rglob("*.py")} == {
        f.parent.relative_to("histospec/client") for f in code if f.parts[1] == "client" and f.suffix == ".py"
    }
    (entry_points,) = (f for f in files if f.name == "entry_points.txt")
    assert zipfile.ZipFile(wheel).read(str(entry_points)).decode().split() == [
        *("[console_scripts]", "histospec", "=", "histospec.client.doctor.__main__:client_only"),
        *("[sglang.srt.plugins]", "histospec", "=", "histospec.client.sglang.plugin:register"),
        *("[vllm.general_plugins]", "histospec", "=", "histospec.client.vllm.patches.plugin:register"),
    ]


def test_wheel_asks_for_three_packages(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in archive.namelist() if n.endswith("METADATA"))
    asked = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist") or []
    required = [found for found in map(Requirement, asked) if "extra" not in str(found.marker)]
    assert {found.name for found in required} == {"grpcio", "numpy", "protobuf"}


@pytest.mark.parametrize("version", ["5.29", "6.33", "7.36"])
def test_imports_beside_every_protobuf(bare: Path, tmp_path: Path, version: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(bare), "install", "--quiet", "--no-deps"]
    run(*pip, "--target", str(tmp_path), f"protobuf=={version}.*")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HISTOSPEC_")}
    done = run(str(bare), "-c", ROUND_TRIP, version, env=environment | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert str(bare.parents[1]) in done.stdout
    assert "protobuf" not in done.stderr.lower()  # it warns of generated code that it does not like


def test_the_command_has_the_doctor_alone(bare: Path, server: Server) -> None:
    def histospec(*words: str) -> "subprocess.CompletedProcess[str]":
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("HISTOSPEC_", "PYTHONPATH"))}
        environment["HISTOSPEC_DEADLINE"] = "30"
        command = [str(bare.with_name("histospec")), *words]
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=400)

    done = histospec("doctor", "--endpoint", server.endpoint, "--namespace", "run-1", "--timeout", "60")
    assert (done.returncode, done.stderr) == (0, "")
    assert "  ok    step       20 steps took " in done.stdout
    assert "  ok    vllm       vLLM is not installed here" in done.stdout
    assert histospec("--help").stdout.startswith("usage: histospec doctor [OPTIONS]\n\nonly the client is installed")
    for words in (("serve", "--help"), ()):
        refused = histospec(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "only the client is installed here, and its command is `histospec doctor`" in refused.stderr
        assert refused.stderr.count("\n") == 1
