"""Real Redis servers for tests, single and as a Cluster, on free ports and with separate directories."""

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import redis

from tests.support.network import Host
from tests.support.ports import free_port
from tests.support.programs import program
from tests.support.waiting import eventually


def require_redis() -> None:
    """Skips the test where there is no redis-server."""
    program("redis-server")


def _ready(condition: Callable[[], object], what: str) -> None:
    """Waits until it holds; a server that still starts counts as no."""
    eventually(condition, what, no=redis.RedisError)


class RedisProcess:
    """One redis-server, which can be killed and started again on its port with its data; on loopback, or on a host."""

    def __init__(self, folder: Path, *options: str, host: Host | None = None, password: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.host = host
        self.address = host.address if host else "127.0.0.1"
        self.port = free_port()
        self.options = options
        self.password = password
        self.start()

    @property
    def where(self) -> str:
        return f"{self.address}:{self.port}"

    @property
    def url(self) -> str:
        return f"redis://{self.where}"

    def start(self) -> None:
        """Starts it; waits until it answers."""
        command = [*(self.host.prefix if self.host else ()), "redis-server", "--protected-mode", "no"]
        command += ["--port", str(self.port), "--dir", str(self.folder), "--bind", self.address]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always", *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.client = redis.Redis(self.address, self.port, password=self.password, socket_timeout=10)
        _ready(self.client.ping, f"redis-server at {self.where} does not answer")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def pause(self) -> None:
        """It stops in its tracks: connections stay, answers do not come."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it as a crash would."""
        self.process.kill()
        self.process.wait()


class RedisCluster:
    """Three masters, with a replica each if asked for; on loopback, or each on the host of its place in the list."""

    def __init__(self, folder: Path, replicas: int = 0, hosts: Sequence[Host] | None = None) -> None:
        options = ("--cluster-enabled", "yes", "--repl-diskless-sync-delay", "0")
        self.nodes: list[RedisProcess] = []
        try:
            for i in range(3 * (1 + replicas)):
                self.nodes.append(RedisProcess(folder / str(i), *options, host=hosts[i] if hosts else None))
            command = ["redis-cli", "--cluster", "create", *(node.where for node in self.nodes)]
            command += ["--cluster-replicas", str(replicas), "--cluster-yes"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            self.recovers()
            for node in self.nodes:  # only now: a node forgets another that it could not meet within the timeout
                node.client.config_set("cluster-node-timeout", 1000)
                node.options += ("--cluster-node-timeout", "1000")
        except BaseException:
            self.kill()
            raise

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(node.where for node in self.nodes)

    def masters(self) -> list[RedisProcess]:
        """Those that take writes now, and run."""
        return [n for n in self.nodes if n.running and n.client.info("replication")["role"] == "master"]

    def recovers(self) -> None:
        _ready(self._whole, "the Redis Cluster is not whole")

    def _whole(self) -> bool:
        """Whether every slot has its master, every master its replicas, and every replica what its master has."""
        about = [node.client.info("replication") for node in self.nodes]
        masters = [a for a in about if a["role"] == "master"]
        return (
            len(masters) == 3
            and sum(a["connected_slaves"] for a in masters) == len(self.nodes) - 3
            and all(a["master_link_status"] == "up" for a in about if a["role"] == "slave")
            and all(node.client.cluster("info")["cluster_state"] == "ok" for node in self.nodes)
        )

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
