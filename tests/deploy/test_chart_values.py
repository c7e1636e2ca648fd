"""Values of users: the chart names and refuses wrong ones, and options reach the server."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from histospec.server.settings.config import Config
from histospec.server.settings.options import load
from tests.support.charts import CHART, one, options, refusal, render, template
from tests.support.programs import ROOT
from tests.support.servers import Starter

VALUES = Path(__file__).parent / "values"

# The options that the chart sets itself.
ITS_OWN = {"listen", "http", "tls-cert", "tls-key", "tls-client-ca", "tokens", "insecure", "shard-name", "peers",
           "data-dir", "store", "store-file"}  # fmt: skip
BACKUP = "backup.enabled=true,backup.destination.persistentVolumeClaim=backups"
RULES = "serviceMonitor.enabled=true,prometheusRule.enabled=true"
SCALED = "store.kind=redis,store.url=redis://a,autoscaling.enabled=true"


@pytest.mark.parametrize(
    ("set_", "said"),
    [
        ("replicas=many", "replicas: Invalid type. Expected: integer"),
        ("replicas=-1", "replicas: Must be greater than or equal to 0"),
        ("replica=2", "Additional property replica is not allowed"),
        ("mode=deployment", 'mode must be one of the following: "statefulset", "daemonset"'),
        ("image.digest=sha256:12", "image.digest: Does not match"),
        ("image.pullPolicy=Sometimes", "image.pullPolicy must be one of"),
        ("options.memory=8Gi", "options.memory is 8Gi; must be a size for the server, such as 8GiB"),
        ("options.memory=8", "options.memory: Invalid type. Expected: string"),
        ("options.shard-name=a", "options: Additional property shard-name is not allowed"),
        ("options.drain-seconds=-2", "options.drain-seconds: Must be greater than or equal to 0"),
        ("options.threads=65", "options.threads: Must be less than or equal to 64"),
        ("options.max-draft-tokens=2000", "options.max-draft-tokens: Must be less than or equal to 1024"),
        ("options.max-batch=2147483648", "options.max-batch: Must be less than or equal to 2.147483647e+09"),
        ("options.drain-seconds=100000", "options.drain-seconds: Must be less than or equal to 86400"),
        ("options.max-message=2GiB", "options.max-message is 2GiB; must be from 1KiB to 1GiB"),
        ("options.max-message=512B", "options.max-message is 512B; must be from 1KiB to 1GiB"),
        ("options.memory=512KiB", "options.memory is 512KiB; must be from 1MiB to 128TiB"),
        ("options.disk=512KiB", "options.disk is 512KiB; must be from 1MiB to 128TiB"),
        ("options.max-backlog=1KiB", "options.max-backlog is 1KiB; must be from 1MiB to 128TiB"),
        ("options.specrl-namespace= a", "options.specrl-namespace: Does not match pattern"),
        ("options.log-level=loud", "options.log-level must be one of"),
        ("store.kind=mysql", 'store.kind must be one of the following: "sqlite", "redis"'),
        ("store.url=http://redis", "store.url: Does not match"),
        ("store.kind=redis", "store.kind redis needs a URL: set store.url or store.existingSecret"),
        ("store.url=redis://redis:6379", "store.url and store.existingSecret need store.kind redis, but it is sqlite"),
        (
            "store.kind=redis,store.url=redis://a,store.existingSecret=b",
            "store.url and store.existingSecret: set only one",
        ),
        ("store.kind=redis,store.url=redis://a,options.disk=1GiB", "options.disk limits the file of store.kind sqlite"),
        ("options.disk=100Gi", "options.disk is 100Gi; must be a size for the server"),
        ("persistence.size=big", "persistence.size is big; must be a quantity of Kubernetes, such as 10Gi"),
        ("persistence.retentionPolicy.whenScaled=Keep", "persistence.retentionPolicy.whenScaled must be one of"),
        ("emptyDir.dataSize=20GiB", "emptyDir.dataSize is 20GiB; must be a quantity of Kubernetes"),
        ("scaleDown.confirmReplicas=some", "scaleDown.confirmReplicas: Must validate one and only one schema"),
        ("sizing.tight=true", "sizing: Additional property tight is not allowed"),
        ("persistence.accessModes={ReadOnlyMany}", "persistence.accessModes.0 must be one of"),
        ("daemonset.hostPort=65536", "daemonset.hostPort: Must be less than or equal to 65535"),
        ("daemonset.hostPath=data", "daemonset.hostPath: Does not match"),
        ("security.insecure=maybe", "security.insecure: Invalid type. Expected: boolean"),
        ("extraEnv[0].name=A,extraEnv[1].name=A", "extraEnv: the variable A is there twice"),
        (
            "extraEnv[0].name=MALLOC_TOP_PAD_",
            "extraEnv: the variable MALLOC_TOP_PAD_ is there twice, or the chart sets",
        ),
        ("backup.extraEnv[0].name=A,backup.extraEnv[1].name=A", "backup.extraEnv: the variable A is there twice"),
        ("tokens.create=sometimes", "tokens.create: Invalid type. Expected: boolean"),
        ("tokens.existingSecret=Not_A_Name", "tokens.existingSecret: Does not match"),
        ("tls.clientCA.existingSecret=ca", "tls.clientCA.existingSecret: client certificates need TLS"),
        ("tls.cert=inline", "tls: Additional property cert is not allowed"),
        ("service.type=ExternalName", "service.type must be one of"),
        ("service.nodePort=65536", "service.nodePort: Must be less than or equal to 65535"),
        ("service.externalTrafficPolicy=Nearby", "service.externalTrafficPolicy must be one of"),
        ("updateStrategy.type=Recreate", "updateStrategy.type must be one of"),
        ("startupProbe.failures=3", "startupProbe: Additional property failures is not allowed"),
        ("livenessProbe.periodSeconds=0", "livenessProbe.periodSeconds: Must be greater than or equal to 1"),
        ("lifecycle.preStart.exec=1", "lifecycle: Additional property preStart is not allowed"),
        ("extraVolumeMounts[0].name=ca", "extraVolumeMounts.0: mountPath is required"),
        ("extraContainers[0].name=logs", "extraContainers.0: image is required"),
        ("preStopSeconds=-1", "preStopSeconds: Must be greater than or equal to 0"),
        ("podDisruptionBudget.maxUnavailable=most", "podDisruptionBudget.maxUnavailable"),
        ("autoscaling.enabled=true", "autoscaling.enabled needs store.kind redis"),
        ("autoscaling.minReplicas=0", "autoscaling.minReplicas: Must be greater than or equal to 1"),
        (f"{SCALED},autoscaling.maxReplicas=1", "autoscaling.maxReplicas is less than autoscaling.minReplicas"),
        (f"{SCALED},mode=daemonset", "autoscaling.enabled: mode daemonset always has one shard per node"),
        ("serviceMonitor.interval=often", "serviceMonitor.interval: Does not match"),
        ("topologySpreadConstraints=zone", "topologySpreadConstraints: Invalid type. Expected: array"),
        ("extraEnv[0].value=1", "extraEnv.0: name is required"),
        ("test.args=--token-file", "test.args: Invalid type. Expected: array"),
        (f"{SCALED},autoscaling.target=70", "autoscaling.target is 70; for metric load it must be at most 1"),
        (f"{SCALED},autoscaling.metric=cpu", "autoscaling.target is 0.6; for metric cpu it is a percentage"),
        ("autoscaling.metric=qps", 'autoscaling.metric must be one of the following: "load", "cpu"'),
        ("autoscaling.target=0", "autoscaling.target: Must be greater than 0"),
        ("prometheusRule.enabled=true", "prometheusRule.enabled: the rules select the label job"),
        (f"{RULES},prometheusRule.disabled={{HistoSpecMoon}}", "prometheusRule.disabled: unknown alert HistoSpecMoon"),
        ("prometheusRule.runbookBase=docs", "prometheusRule.runbookBase: Does not match"),
        ("serviceMonitor.relabelings=drop", "serviceMonitor.relabelings: Invalid type. Expected: array"),
        ("backup.enabled=true", "backup.enabled needs a destination: set backup.destination.persistentVolumeClaim or"),
        (f"{BACKUP},backup.destination.url=s3://b/p", "backup.destination.url: set only one of them"),
        (
            f"{BACKUP},backup.destination.existingSecret=s",
            "holds credentials for backup.destination.url: set that, too",
        ),
        (f"{BACKUP},mode=daemonset", "in mode daemonset with store.kind sqlite, no address reaches all shards"),
        (
            f"{BACKUP},tokens.existingSecret=t",
            "set backup.tokenSecret to a Secret that holds a token with the right to admin",
        ),
        (
            f"{BACKUP},tls.existingSecret=a,tls.clientCA.existingSecret=b",
            "set backup.tlsSecret to a Secret with ca.crt, tls.crt and tls.key",
        ),
        ("backup.keep=0", "backup.keep: Must be greater than or equal to 1"),
        ("backup.schedule=nightly", "backup.schedule: Does not match pattern"),
        ("backup.destination.url=ftp://b/p", "backup.destination.url: Does not match pattern"),
        ("backup.destination.url=s3://b/all.jsonl.gz", "backup.destination.url: Must not validate the schema (not)"),
        ("backup.place=s3", "Additional property place is not allowed"),
    ],
)
def test_nonsense_is_refused_by_name(set_: str, said: str) -> None:
    assert said in refusal("--set", set_)


def test_the_schema_knows_every_value_and_every_option() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema.keys() - {"global"} == values.keys()
    options = {name.replace("_", "-") for name in Config.model_fields}
    assert schema["options"]["properties"].keys() == options - ITS_OWN
    everything = yaml.safe_load((VALUES / "everything.yaml").read_text())
    assert everything["options"].keys() == options - ITS_OWN, "tests/deploy/values/everything.yaml sets them all"


def bounds(field: FieldInfo) -> dict[str, Any]:
    """Returns the bounds of an option of the server, in the words of the schema."""
    parts = [*field.metadata, *(part for annotated in get_args(field.annotation) for part in get_args(annotated))]
    known = {"ge": "minimum", "le": "maximum", "max_length": "maxLength"}
    return {word: getattr(part, name) for part in parts for name, word in known.items() if hasattr(part, name)}


def test_numbers_have_the_bounds_that_the_server_gives_them() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    compared = 0
    for name, field in Config.model_fields.items():
        if (given := schema["properties"]["options"]["properties"].get(name.replace("_", "-"))) is None:
            continue
        given = given | schema["definitions"].get(given.get("$ref", "").rpartition("/")[2], {})
        assert {word: given[word] for word in ("minimum", "maximum", "maxLength") if word in given} == bounds(field), (
            name
        )
        compared += bool(bounds(field))
    assert compared >= 13


def server_takes(option: str, value: str) -> bool:
    try:
        Config.model_validate({option.replace("-", "_"): value})
    except ValidationError:
        return False
    return True


SIZES = ("memory", "disk", "max-backlog", "max-message")


@pytest.mark.parametrize(
    "size", ["0", "1023B", "1KiB", "1048575B", "1MiB", "1GiB", "1073741825B", "128TiB", "140737488355329B"]
)
def test_sizes_have_the_bounds_that_the_server_gives_them(size: str) -> None:
    words = ",".join(f"options.{name}={size}" for name in SIZES)
    said = template("--set-string", words, "--set", "resources.limits.memory=null,persistence.size=1Pi").stderr
    assert {name for name in SIZES if f"options.{name} is {size}; must be" in said} == {
        name for name in SIZES if not server_takes(name, size)
    }


def test_no_limit_of_the_file_may_be_a_number() -> None:
    assert options(render("--set", "options.disk=0"))["disk"] == "0"
    assert "options.disk is 5; must be a size for the server" in refusal("--set", "options.disk=5")


@pytest.mark.parametrize("path", sorted(VALUES.glob("*.yaml")), ids=lambda path: path.stem)
def test_rendered_options_add_up(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "histospec.toml"
    file.write_text(one(render("--values", path), "ConfigMap")["data"]["histospec.toml"])
    config = load(["--config", str(file)])
    assert (str(config.listen), str(config.http), str(config.data_dir)) == ("0.0.0.0:6378", "0.0.0.0:9464", "/data")
    for key, value in (yaml.safe_load(path.read_text()) or {}).get("options", {}).items():
        got = getattr(config, key.replace("-", "_"))
        if key == "http-hosts":
            got = [host for host in got if host in value]  # the chart adds the names of its Services
        assert got == value or str(value).endswith("B") or str(got) == str(value).removeprefix("otlp://"), key


def test_the_dashboard_is_the_one_in_deploy() -> None:
    (packaged,) = [
        m for m in render("--values", VALUES / "everything.yaml") if m["metadata"]["name"].endswith("-dashboard")
    ]
    assert packaged["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert packaged["data"]["histospec.json"] == (ROOT / "deploy" / "grafana" / "histospec.json").read_text()


@pytest.mark.parametrize("values", ["default", "everything", "insecure", "minimal", "published"])
def test_the_server_takes_the_rendered_options(values: str, start_server: Starter, tmp_path: Path) -> None:
    certificates = pytest.importorskip("trustme").CA()
    certificate = certificates.issue_cert("127.0.0.1")
    certificates.cert_pem.write_to_path(tmp_path / "ca.crt")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "workers"\nsecret = "a secret of some length"\n')
    text = one(render("--values", VALUES / f"{values}.yaml"), "ConfigMap")["data"]["histospec.toml"]
    # The test has its own files and ports in place of the pod's.
    for folder in ("tokens", "tls", "client-ca"):
        text = text.replace(f"/etc/histospec/{folder}", str(tmp_path))
    (tmp_path / "histospec.toml").write_text(text)
    server = start_server("--config", str(tmp_path / "histospec.toml"), "--log-level", "info")
    server.drain()
