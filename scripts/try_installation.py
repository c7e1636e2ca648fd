"""Tries the HistoSpec that is installed beside this Python: `python scripts/try_installation.py STAGE...`.

    bare     the client and the engine import; commands whose extra is missing name the extra
    client   a build with HISTOSPEC_CLIENT_ONLY=1: the client imports, other commands say that it is alone
    server   with the extra `server`: the Python code of docs/quickstart.md runs against `histospec serve`
    replay   with the extra `replay`: a small recording is replayed and plotted

Needs the standard library and the installation alone, so that it runs in clean environments.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parent.parent / "docs" / "quickstart.md"
HISTOSPEC = str(Path(sys.executable).with_name("histospec"))
START_SECONDS = 60


def run(*command: str, code: int = 0, says: str = "") -> str:
    """Runs a command in an empty folder. Returns what it prints.

    Raises:
        SystemExit: the exit code is another one, or `says` is not in the output.

    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HISTOSPEC_", "PYTHON"))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    output = done.stdout + done.stderr
    if done.returncode != code or says not in output or "Traceback" in output:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}, expected {code} and {says!r}\n{output}")
    return output


def bare() -> None:
    """Tries the three dependencies alone."""
    run(sys.executable, "-c", "import histospec.client, histospec.client.rollouts, histospec.native as n; n.Engine")
    run(HISTOSPEC, "doctor", "--help")
    for command in ("serve", "run", "status", "snapshot", "restore", "forget", "bench"):
        run(HISTOSPEC, command, code=2, says="pip install 'histospec[server]'")
    run(HISTOSPEC, "replay", "absent.jsonl", code=2, says="pip install 'histospec[replay]'")


def client() -> None:
    """Tries a build of the client alone."""
    run(sys.executable, "-c", "import histospec.client, histospec.client.rollouts")
    run(HISTOSPEC, "doctor", "--help")
    run(HISTOSPEC, "serve", code=2, says="HISTOSPEC_CLIENT_ONLY=1")


def server() -> None:
    """Runs the quickstart's Python code against a server, and asks for the server's status."""
    grpc, http = (f"127.0.0.1:{port}" for port in free_ports(2))
    (code,) = re.findall(r"^```python\n(.*?)^```", QUICKSTART.read_text(), re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        command = [HISTOSPEC, "serve", "--listen", grpc, "--http", http, "--data-dir", f"{folder}/data"]
        serving = subprocess.Popen([*command, "--memory", "64MiB"], cwd=folder)
        try:
            until_ready(http, serving)
            run(sys.executable, "-c", code.replace("127.0.0.1:6378", grpc), says="[7, 8, 9]\n3 responses\n")
            run(HISTOSPEC, "status", grpc, "--http", http, says="SERVING")
        finally:
            serving.terminate()
            ended = serving.wait(60)
    if ended != 0:
        raise SystemExit(f"histospec serve ended with exit code {ended}")


def replay() -> None:
    """Replays and plots a recording of one problem that repeats itself."""
    tokens = list(range(40))
    responses = [{"epoch": epoch, "group": epoch, "tokens": [*tokens, epoch]} for epoch in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        recording, plot = Path(folder) / "rollouts.jsonl", Path(folder) / "plot.png"
        recording.write_text(json.dumps({"id": "a", "prompt": [1, 2, 3], "responses": responses}) + "\n")
        run(HISTOSPEC, "replay", str(recording), "--plot", str(plot))
        if not plot.stat().st_size:
            raise SystemExit("histospec replay drew no plot")


def free_ports(count: int) -> list[int]:
    """Returns ports of loopback that no process listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ready(http: str) -> bool:
    """Returns whether /readyz says so."""
    try:
        urllib.request.urlopen(f"http://{http}/readyz", timeout=5).close()
    except OSError:
        return False
    return True


def until_ready(http: str, serving: "subprocess.Popen[bytes]") -> None:
    """Waits until the server is ready.

    Raises:
        SystemExit: the server ended, or is not ready within a minute.

    """
    end = time.monotonic() + START_SECONDS
    while not ready(http):
        if time.monotonic() > end or serving.poll() is not None:
            raise SystemExit(f"histospec serve is not ready; exit code {serving.poll()}")
        time.sleep(0.2)


STAGES = {"bare": bare, "client": client, "server": server, "replay": replay}

if __name__ == "__main__":
    for stage in sys.argv[1:] or ["bare"]:
        STAGES[stage]()
