"""`histospec run -- COMMAND`: a draft server for the time of a command, such as a training job of Slurm or Ray.

The server is a child process beside the command, and no fault of it ends the command. If it crashes, it starts again at
the same address.
"""

import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from histospec.server.arguments import ArgumentParser
from histospec.server.errors import ConfigError, reason
from histospec.server.process import TOGETHER, ends, say
from histospec.server.settings import options
from histospec.server.settings.addresses import Address
from histospec.server.settings.config import PREFIX, Config

EVERY_INTERFACE = ("0.0.0.0", "::")
FREE_PORTS = {"listen": "0.0.0.0:0", "http": "127.0.0.1:0"}
"""Several jobs may share a machine, and workers on other machines connect to the first of these."""
RESTART_SECONDS = 5.0
"""Pause before a crashed server starts again. One that cannot start adds at most 20,000 messages a day to the log."""
POLL_SECONDS = 0.1
"""Python handles a signal in the main thread, and a signal to another thread does not wake it from an endless wait."""
ANYWHERE = ("192.0.2.1", 9)  # reserved for documentation: only the route to it is looked up
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""In this variable Ray gives a job its runtime environment. `ray.init` adds the caller's to it."""


def main(argv: Sequence[str]) -> int:
    """Runs the command. Returns its exit code, 128 + N if signal N ended it. Raises HistoSpecError."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    own, command = words[:at], words[at + 1 :]
    parser = options.parser(
        Config,
        "histospec run",
        "Run COMMAND with a draft server beside it, which drains when COMMAND ends. COMMAND gets HISTOSPEC_ENDPOINT, "
        "and HISTOSPEC_TOKEN unless the options say who may call. The server listens at a free port of all interfaces, "
        "unless --listen or HISTOSPEC_LISTEN is given.",
    )
    parser.usage = "histospec run [OPTIONS] -- COMMAND [ARGUMENTS]"
    _add_own(parser)
    flags = vars(parser.parse_args(own))
    if not command:
        raise ConfigError(
            "no command was given; put it behind --, as in: histospec run --data-dir DIR -- python train.py"
        )
    mine = ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own(mine)
    chosen, of_server = mine.parse_known_args(own)

    environment = os.environ | {PREFIX + name.upper(): at for name, at in FREE_PORTS.items() if not _given(name, flags)}
    config = options.settle(
        Config, {k: v for k, v in flags.items() if k not in ("host", "ray")} | {"listen": "localhost:0"}
    )
    given: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="histospec-run-") as folder:
        if config.tokens is None and config.tls_client_ca is None and not config.insecure:
            given[f"{PREFIX}TOKEN"] = secrets.token_urlsafe(32)
            environment[f"{PREFIX}TOKENS"] = str(_token_file(Path(folder), given[f"{PREFIX}TOKEN"]))
        with _Server(of_server, environment) as server:
            if server.listening is None:
                return server.code
            given[f"{PREFIX}ENDPOINT"] = str(_reached_at(server.listening, chosen.host))
            return _run(command, _for_workers(given, chosen.ray), server)


def _add_own(parser: ArgumentParser) -> None:
    """Adds the options that `histospec serve` does not have."""
    host = (
        "name or address of this machine for workers (default: the address of its default route, or host of --listen)"
    )
    parser.add_argument("--host", default=None, help=host)
    ray = "also give the variables to the workers of Ray that COMMAND starts with ray.init"
    parser.add_argument("--ray", action="store_true", default=False, help=ray)


def _given(name: str, flags: Mapping[str, object]) -> bool:
    return name in flags or bool(os.environ.get(PREFIX + name.upper()))


def _token_file(folder: Path, token: str) -> Path:
    """Writes a file in which this token has every right."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    path = folder / "tokens.toml"
    path.write_text(f'[[token]]\nname = "job"\nsha256 = "{digest}"\nrights = ["read", "write", "admin"]\n')
    return path


def _reached_at(listening: Address, host: str | None) -> Address:
    """Returns the address at which workers on other machines reach a server that listens here. Raises ConfigError."""
    if host is not None or listening.host not in EVERY_INTERFACE:
        return Address(host or listening.host, listening.port)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(ANYWHERE)
            return Address(probe.getsockname()[0], listening.port)
    except OSError as error:
        raise ConfigError(
            f"--host: this machine has no default route ({reason(error)}); give the name or address that workers reach"
        ) from None


def _for_workers(given: Mapping[str, str], ray: bool) -> dict[str, str]:
    """Returns the environment of the command. With `ray`, Ray's workers on every machine get its variables, too."""
    environment = os.environ | given
    if f"{PREFIX}TOKEN" in given:
        environment.pop(f"{PREFIX}TOKEN_FILE", None)  # a client takes its token from one place
    if ray:
        job = json.loads(environment.get(RAY_JOB, "{}"))
        runtime = job["runtime_env"] = job.get("runtime_env") or {}
        ours = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
        runtime["env_vars"] = (runtime.get("env_vars") or {}) | ours
        environment[RAY_JOB] = json.dumps(job)
    return environment


def _run(words: list[str], environment: Mapping[str, str], server: "_Server") -> int:
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        server.signalled = True
        if number == signal.SIGINT:
            return  # a terminal sends it to all processes of the job, so the command already has it
        if not started:
            early.append(number)
        for command in started:
            command.send_signal(number)

    for number in filter(ends, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        signal.signal(number, forward)
    try:
        started.append(subprocess.Popen(words, env=environment))
    except OSError as error:
        raise ConfigError(f"{words[0]}: cannot be started ({reason(error)})") from None
    (command,) = started
    for missed in early:
        command.send_signal(missed)
    while (code := command.poll()) is None:
        time.sleep(POLL_SECONDS)
    return code if code >= 0 else 128 - code


class _Server:
    """The process of the server. A context: the server listens, or could not start, when it is entered.

    listening: where it listens; None if it ended before it did. code: its exit code then. signalled: the launcher got a
    signal, which all processes of the job may have got.
    """

    def __init__(self, flags: Sequence[str], environment: Mapping[str, str]) -> None:
        self.listening: Address | None = None
        self.code = 0
        self.signalled = False
        self._flags = list(flags)
        self._environment = environment
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, name="server", daemon=True)

    def __enter__(self) -> "_Server":
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # a signal
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Drains the server and waits for its end, which the server itself bounds."""
        self._stopping.set()
        # A second SIGTERM would cut the drain short. If the server has the launcher's signal, too, it soon says so.
        if not self._draining.wait(TOGETHER if self.signalled else 0):
            self._process.terminate()
        self._thread.join()

    def _start(self) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "histospec.server", "serve", *self._flags, "--log-format", "json"]
        if self.listening is not None:
            words += ["--listen", str(self.listening)]
        return subprocess.Popen(words, env=self._environment, stderr=subprocess.PIPE, text=True, errors="replace")

    def _watch(self) -> None:
        """Passes the server's log on, and starts the server again if it crashes."""
        while True:
            assert self._process.stderr is not None
            for line in self._process.stderr:
                say(line.rstrip("\n"))
                self._read(line)
            self.code = self._process.wait()
            if self.listening is None or self._draining.is_set() or self._stopping.is_set():
                break
            say(f"histospec run: the server ended with {self.code}; it starts again at {self.listening}")
            if self._stopping.wait(RESTART_SECONDS):
                break
            self._process = self._start()
            if self._stopping.is_set():  # since the pause, so `__exit__` may have missed this process
                self._process.terminate()
        self._started.set()

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return
        event = entry.get("event") if isinstance(entry, dict) else None
        if event == "listening" and self.listening is None:
            self.listening = Address.parse(entry["grpc"])
            self._started.set()
        elif event == "draining":
            self._draining.set()
