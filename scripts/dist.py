"""Builds the source distribution and a wheel for every Python on this machine, and tries them: `make dist`.

The wheels are built from the source distribution, repaired by auditwheel and installed into clean environments whose
PATH has no compiler. There, scripts/try_installation.py runs. A release's wheels come from `make wheels`, which builds
the same in manylinux containers.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"
TOOLS = Path(sys.executable).parent
SUPPORTED = [f"3.{minor}" for minor in range(10, 15)]
TRY = ROOT / "scripts" / "try_installation.py"
ABOUT = """
import ensurepip, os, sys, sysconfig
print(f"{sys.version_info[0]}.{sys.version_info[1]}", os.path.exists(f"{sysconfig.get_path('include')}/Python.h"))
"""


def run(*command: "str | Path", **environment: str) -> None:
    """Runs a command at the root; ends this script if it fails."""
    print("+", *command, flush=True)
    if code := subprocess.run(command, cwd=ROOT, env=os.environ | environment).returncode:
        raise SystemExit(f"{command[0]} failed with exit code {code}")


def interpreters() -> dict[str, Path]:
    """Returns a Python of each supported version that this machine has, with its headers."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(pyenv.glob("3.*/bin/python")), Path(sys.executable)]
    candidates += [Path(path) for version in SUPPORTED if (path := shutil.which(f"python{version}"))]
    found: dict[str, Path] = {}
    for python in candidates:
        said = subprocess.run([python, "-c", ABOUT], capture_output=True, text=True)
        version, _, headers = said.stdout.strip().partition(" ")
        if said.returncode == 0 and headers == "True" and version in SUPPORTED:
            found.setdefault(version, python)
    return dict(sorted(found.items(), key=lambda item: SUPPORTED.index(item[0])))


def environment(python: Path, name: str) -> Path:
    """Returns the folder of programs of a new virtual environment."""
    run(python, "-m", "venv", WORK / name)
    return WORK / name / "bin"


def build_wheel(python: Path, sdist: Path, name: str) -> Path:
    """Builds a wheel from the source distribution. Returns the wheel that auditwheel repaired."""
    raw = WORK / f"raw-{name}"
    run(environment(python, f"build-{name}") / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", raw, sdist)
    (built,) = raw.glob("*.whl")
    before = set(DIST.glob("*.whl"))
    run(TOOLS / "auditwheel", "repair", "--wheel-dir", DIST, built, PATH=f"{TOOLS}:{os.environ['PATH']}")
    (repaired,) = set(DIST.glob("*.whl")) - before
    return repaired


def try_wheel(python: Path, wheel: Path, name: str, *extras: str) -> None:
    """Installs a wheel where no compiler is, tries it, and tries it again with each extra."""
    programs = environment(python, f"wheel-{name}")
    here = {"PATH": str(programs)}
    for stage in ("bare", *extras):
        asked = f"{wheel}[{stage}]" if stage != "bare" else str(wheel)
        run(programs / "python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", asked, **here)
        run(programs / "python", TRY, stage, **here)


def try_sdist(python: Path, sdist: Path) -> None:
    """Installs the source distribution with a compiler, and the client alone without one."""
    programs = environment(python, "sdist")
    for stage, asked in (("bare", str(sdist)), ("server", f"{sdist}[server]")):
        run(programs / "python", "-m", "pip", "install", "--quiet", asked)
        run(programs / "python", TRY, stage)
    programs = environment(python, "client")
    here = {"PATH": str(programs), "CC": "/bin/false", "CXX": "/bin/false"}
    run(programs / "python", "-m", "pip", "install", "--quiet", sdist, HISTOSPEC_CLIENT_ONLY="1", **here)
    run(programs / "python", TRY, "client", **here)


def main() -> None:
    """Builds and tries everything. Prints what was tried, and which Pythons were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", choices=SUPPORTED, help="only this version; may be repeated")
    wanted = parser.parse_args().python or SUPPORTED
    pythons = {version: python for version, python in interpreters().items() if version in wanted}
    if not pythons:
        raise SystemExit(f"no Python {' or '.join(wanted)} with its headers is on this machine")

    shutil.rmtree(DIST, ignore_errors=True)
    shutil.rmtree(WORK, ignore_errors=True)
    run(TOOLS / "python", "-m", "build", "--sdist", "--outdir", DIST)
    (sdist,) = DIST.glob("*.tar.gz")
    wheels = {version: build_wheel(python, sdist, version) for version, python in pythons.items()}
    run(TOOLS / "twine", "check", "--strict", sdist, *wheels.values())

    last = list(pythons)[-1]
    for version, python in pythons.items():
        try_wheel(python, wheels[version], version, "server", *(["replay"] if version == last else []))
    try_sdist(pythons[last], sdist)

    lines = [f"{sdist.name}: installed with Python {last}, and as the client alone without a compiler"]
    lines += [f"{wheel.name}: installed and run with Python {version}" for version, wheel in wheels.items()]
    absent = [version for version in SUPPORTED if version not in pythons]
    if absent:
        lines.append(f"not tried on this machine ({platform.machine()}): Python {', '.join(absent)}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
