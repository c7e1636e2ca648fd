"""Hosts for tests: network namespaces on one switch. Tests can disconnect them, or make them lose packets.

The test process reaches each host by its address. Packets of a disconnected host are dropped without an error, as if
its cable were unplugged.
"""

import contextlib
import os
import subprocess

import pytest

from tests.support.programs import PATH, program

NETWORKS = 250


def _run(*command: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PATH": PATH}
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment)


class Host:
    """One host. What runs there has `address`, and the loopback of no other."""

    def __init__(self, namespace: str, address: str) -> None:
        self.address = address
        self.namespace = namespace
        self.prefix = (program("ip"), "netns", "exec", namespace)
        """Before a command that is to run there. It becomes the command: process id and signals are its own."""

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Runs a command to its end; it must succeed."""
        return _run(*self.prefix, *command)

    def cut(self, *others: "Host") -> None:
        """No packet passes any more, either way; with others named, none to and from these."""
        for other in others:
            self._drop("INPUT", "-s", other.address)
            self._drop("OUTPUT", "-d", other.address)
        if not others:
            self._drop("INPUT", "-i", "eth0")
            self._drop("OUTPUT", "-o", "eth0")

    def lose(self, share: float) -> None:
        """This share of its packets is lost, at random, either way."""
        for chain in ("INPUT", "OUTPUT"):
            self._drop(chain, "-m", "statistic", "--mode", "random", "--probability", str(share))

    def heal(self) -> None:
        """All packets pass again."""
        self.run("iptables", "-w", "-F")

    def _drop(self, chain: str, *which: str) -> None:
        self.run("iptables", "-w", "-A", chain, *which, "-j", "DROP")


class Network:
    """A switch, in a namespace of its own, and its hosts. Skips the test where there can be none."""

    def __init__(self) -> None:
        for tool in ("ip", "iptables"):
            program(tool)
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        self._namespaces: list[str] = []
        self._name = self._claim()
        number = self._name.rpartition("-")[2]
        self._subnet = f"10.77.{number}."
        self._port = f"histospec{number}"
        try:
            switch = f"netns exec {self._name} ip link"
            _run("ip", *switch.split(), "add", "switch", "type", "bridge")
            _run("ip", *switch.split(), "set", "switch", "up")
            _run("ip", "link", "add", self._port, "type", "veth", "peer", "name", "port0", "netns", self._name)
            _run("ip", "address", "add", f"{self._subnet}254/24", "dev", self._port)
            _run("ip", "link", "set", self._port, "up")
            _run("ip", *switch.split(), "set", "port0", "master", "switch", "up")
            self.host().run("iptables", "-w", "-L")
        except (subprocess.CalledProcessError, OSError) as error:
            self.close()
            pytest.skip(f"no network of namespaces: {getattr(error, 'stderr', None) or error}")

    def host(self) -> Host:
        number = len(self._namespaces)
        host = Host(f"{self._name}-{number}", f"{self._subnet}{number}")
        _run("ip", "netns", "add", host.namespace)
        self._namespaces.append(host.namespace)
        port = f"port{number}"
        _run("ip", "link", "add", "eth0", "netns", host.namespace, "type", "veth", "peer", port, "netns", self._name)
        _run("ip", "netns", "exec", self._name, "ip", "link", "set", port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        host.run("ip", "link", "set", "lo", "up")
        return host

    def close(self) -> None:
        """Takes everything down. The processes of its hosts must have ended."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "delete", self._port)
        while self._namespaces:
            _run("ip", "netns", "delete", self._namespaces.pop())

    def _claim(self) -> str:
        """A name, and a number for the subnet, that no test run beside this one has."""
        for number in range(NETWORKS):
            name = f"histospec-{number}"
            done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
            if done.returncode == 0:
                self._namespaces.append(name)
                return name
            if "File exists" not in done.stderr:
                pytest.skip(f"no network namespaces: {done.stderr.strip()}")
        raise RuntimeError("every subnet is taken: `ip netns` shows what earlier runs have left")
