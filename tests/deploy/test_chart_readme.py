"""Every value is documented once: the table in the chart's README, the schema and the values agree."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.support.charts import CHART
from tests.support.programs import program

README = CHART / "README.md"


def leaves(values: dict[str, Any], before: str = "") -> set[str]:
    """Returns dotted names of all values that are not objects with values of their own."""
    names = set()
    for key, value in values.items():
        below = isinstance(value, dict) and value
        names |= leaves(value, f"{before}{key}.") if below else {before + key}
    return names


def rows() -> set[str]:
    return set(re.findall(r"^\| `([^`]+)` ", README.read_text(), re.M))


def documented(leaf: str) -> bool:
    """Returns whether a row describes the value, or the object that contains it."""
    parts = leaf.split(".")
    return any(".".join(parts[:n]) in rows() for n in range(1, len(parts) + 1))


def test_the_table_is_up_to_date(tmp_path: Path) -> None:
    generator = program("readme-generator")
    copy = tmp_path / "README.md"
    shutil.copy(README, copy)
    command = [generator, "--values", str(CHART / "values.yaml"), "--readme", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert copy.read_text() == README.read_text(), "helm/histospec/README.md is old; make manifests"


def test_every_value_is_documented() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert [leaf for leaf in sorted(leaves(values)) if not documented(leaf)] == []


def known(schema: dict[str, Any], definitions: dict[str, Any], before: str = "") -> set[str]:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    below = schema.get("properties")
    if not below:
        return {before}
    return {name for key, value in below.items() for name in known(value, definitions, f"{before}.{key}".lstrip("."))}


def test_every_value_that_the_schema_takes_is_documented() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    taken = known(schema, schema["definitions"])
    # docs/configuration.md describes the options, and the reference of Kubernetes the parts of its objects.
    elsewhere = re.compile(r"^options\.|^global$|\bresources\.|^updateStrategy\.|Probe\.")
    assert [name for name in sorted(taken) if not documented(name) and not elsewhere.search(name)] == []
    assert [row for row in sorted(rows()) if not any(f"{name}.".startswith(f"{row}.") for name in taken)] == []


def test_the_schema_refuses_what_it_does_not_know_at_every_depth() -> None:
    """Objects with default values reject unknown keys, such as typing errors."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    open_objects = re.compile(r"ecurityContext$|\blabels$|\bresources\.")

    def check(schema: dict[str, Any], values: dict[str, Any], name: str) -> None:
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rpartition("/")[2]]
        if open_objects.search(name):
            return
        assert schema.get("additionalProperties") is False, name
        for key, value in values.items():
            if isinstance(value, dict) and value:
                check(schema["properties"][key], value, f"{name}.{key}".lstrip("."))

    definitions = schema["definitions"]
    check(schema, values, "")
