"""A real Prometheus keeps the names of runs, whatever clients called them."""

from pathlib import Path

from tests.support.prometheus import Prometheus, require
from tests.support.servers import Server
from tests.support.waiting import eventually
from tests.support.wires import Wire

NAMES = {
    'a "quoted" name',
    "back\\slash\\n",
    "two\nlines",
    "50% of %d",
    "{braces}",
    "a=b,c",
    "ünï → 日本",
    "_other",
    "run",
}


def test_prometheus_reads_every_name_and_number(server: Server, wire: Wire, tmp_path: Path) -> None:
    require("prometheus")
    for number, name in enumerate(sorted(NAMES)):
        stream = wire.stream()
        stream.ask(opens=[wire.open(1, namespace=name)], step=wire.step([1], [range(number + 2)]))
        stream.end()
    rules = tmp_path / "rules.yaml"
    rules.write_text("groups: []\n")
    prometheus = Prometheus(tmp_path, [server.http], rules)
    try:
        eventually(lambda: prometheus.query("histospec_generated_tokens_total"), "nothing is scraped")
        found = prometheus.query("histospec_generated_tokens_total")
        assert {series["metric"]["run"]: float(series["value"][1]) for series in found} == {
            name: number + 2 for number, name in enumerate(sorted(NAMES))
        }
        assert all(series["metric"]["run"] == series["metric"]["namespace"] for series in found)
        assert [series["value"][1] for series in prometheus.query("up")] == ["1"]
    finally:
        prometheus.close()
