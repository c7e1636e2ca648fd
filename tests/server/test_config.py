"""The sources of options, and the one sentence about a wrong option."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from histospec.native import Engine
from histospec.protocol.limits import MAX_DRAFT
from histospec.server.errors import ConfigError
from histospec.server.machine import memory_limit
from histospec.server.settings.addresses import Address, ShardAddress
from histospec.server.settings.budget import default_budget
from histospec.server.settings.config import MAX_BYTES, MAX_COUNT, Config
from histospec.server.settings.options import load
from tests.support.servers import Server


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Config.model_fields:
        monkeypatch.delenv(f"HISTOSPEC_{name.upper()}", raising=False)
    monkeypatch.delenv("HISTOSPEC_CONFIG", raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "histospec.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_defaults_are_safe() -> None:
    config = load([])
    assert str(config.listen) == "127.0.0.1:6378"
    assert str(config.http) == "127.0.0.1:9464"
    assert (config.memory, config.history_epochs) == (default_budget(memory_limit()), 8)
    assert (config.store, config.store_file, config.kind) == ("sqlite", None, "sqlite")
    assert (config.threads, config.namespace_tokens) == (0, 1 << 19)
    assert (config.retention, config.disk, config.max_backlog) == (0, None, 256 << 20)
    assert config.insecure is False


def test_a_flag_wins_over_the_environment_over_the_file(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file('memory = "1GiB"\nhistory-epochs = 3\ndrain_seconds = 1\ninsecure = true\n')
    monkeypatch.setenv("HISTOSPEC_HISTORY_EPOCHS", "4")
    monkeypatch.setenv("HISTOSPEC_DRAIN_SECONDS", "2")
    config = load(["--config", path, "--drain-seconds", "3"])
    assert (config.memory, config.history_epochs, config.drain_seconds, config.insecure) == (1 << 30, 4, 3, True)
    assert load(["--config", path, "--no-insecure"]).insecure is False


def test_the_file_may_be_named_in_the_environment(file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_CONFIG", file("max-batch = 7"))
    assert load([]).max_batch == 7


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISTOSPEC_MEMORY", "")
    assert load([]).memory == default_budget(memory_limit())


def test_every_option_may_be_given_in_every_way(file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "listen": "127.0.0.1:1",
        "http": "[::1]:2",
        "insecure": "true",
        "shard_name": "s",
        "peers": "a:1,x=b:2",
        "data_dir": "d",
        "store": "sqlite",
        "memory": "2GiB",
        "log_format": "json",
        "log_level": "error",
        "traces": "otlp://127.0.0.1:4317",
    }
    values |= {name: "5" for name in Config.model_fields if name not in (*values, "store_file")}
    values |= dict.fromkeys(("max_message", "max_backlog", "disk"), "5MiB")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if name != "insecure"]
    by_flag = load([*flags, "--insecure"])
    by_file = load(["--config", file("\n".join(f'{name} = "{value}"' for name, value in values.items()))])
    for name, value in values.items():
        monkeypatch.setenv(f"HISTOSPEC_{name.upper()}", value)
    by_environment = load([])
    assert by_flag == by_file == by_environment
    assert by_flag.peers == (ShardAddress("a:1", Address("a", 1)), ShardAddress("x", Address("b", 2)))
    assert all(getattr(by_flag, name) != Config.model_fields[name].default for name in values if name != "store")


def test_the_store_may_be_named_by_a_file_in_every_way(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(["--store-file", "url"]).store_file == Path("url")
    assert load(["--config", file("store-file = 'url'")]).store_file == Path("url")
    monkeypatch.setenv("HISTOSPEC_STORE_FILE", "url")
    assert load([]).store_file == Path("url")
    assert load([]).kind == "redis"
    monkeypatch.setenv("HISTOSPEC_STORE", "sqlite")
    with pytest.raises(ConfigError, match="--store and --store-file: both name the store; give only one of them"):
        load([])


URL = {"store": "redis://a", "store_file": "url"}
"""An option that names the store, and a value of it."""


@pytest.mark.parametrize("higher", URL)
@pytest.mark.parametrize("lower", URL)
def test_the_store_is_the_one_that_the_highest_source_names(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, higher: str, lower: str
) -> None:
    def named(config: Config) -> dict[str, str]:
        return {name: str(getattr(config, name)) for name in URL if name in config.model_fields_set}

    flag = f"--{higher.replace('_', '-')}={URL[higher]}"
    config = ["--config", file(f'{lower} = "other"')]
    assert named(load([flag, *config])) == {higher: URL[higher]}
    monkeypatch.setenv(f"HISTOSPEC_{lower.upper()}", "sqlite")
    assert named(load([flag, *config])) == {higher: URL[higher]}
    assert named(load(config)) == {lower: "sqlite"}


def test_two_names_of_the_store_in_one_source_are_refused_with_the_source(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = "--store and --store-file: both name the store; give only one of them"
    both = file("store = 'sqlite'\nstore-file = 'url'")
    with pytest.raises(ConfigError) as caught:
        load(["--config", both])
    assert str(caught.value) == f"{sentence} (from {both})"
    assert load(["--config", both, "--store", "redis://a"]).store == "redis://a"
    monkeypatch.setenv("HISTOSPEC_STORE", "sqlite")
    assert load(["--config", both]).kind == "sqlite"
    monkeypatch.setenv("HISTOSPEC_STORE_FILE", "url")
    with pytest.raises(ConfigError) as caught:
        load(["--config", both])
    assert str(caught.value) == f"{sentence} (from HISTOSPEC_STORE and HISTOSPEC_STORE_FILE)"
    with pytest.raises(ConfigError) as caught:
        load(["--store", "sqlite", "--store-file", "url"])
    assert str(caught.value) == sentence


def test_no_limit_of_the_file_is_a_limit_of_its_own() -> None:
    assert load(["--disk", "0"]).disk == 0


def test_peers_may_be_a_list_in_the_file(file: Callable[[str], str]) -> None:
    assert [peer.name for peer in load(["--config", file('peers = ["a:1", "x=b:2"]')]).peers] == ["a:1", "x"]


WRONG = {
    "size": (["--memory", "lots"], "--memory: 'lots' is not a size; give a number with a unit, for example 8GiB"),
    "no backlog": (["--max-backlog", "1KiB"], "--max-backlog: must be at least 1MiB"),
    "no retention": (["--retention", "-1"], "--retention: input should be greater than or equal to 0, is '-1'"),
    "no disk": (["--disk", "lots"], "--disk: 'lots' is not a size; give a number with a unit, for example 8GiB"),
    "little disk": (["--disk", "1KiB"], "--disk: must be at least 1MiB"),
    "disk of a file": (["--disk", "1GiB", "--store-file", "url"], "--disk: limits the file of --store sqlite"),
    "two stores": (["--store", "sqlite", "--store-file", "url"], "--store and --store-file: both name the store"),
    "disk of redis": (["--disk", "1GiB", "--store", "redis://a"], "--disk: limits the file of --store sqlite"),
    "little": (["--memory", "1KiB"], "--memory: must be at least 1MiB"),
    "no port": (["--listen", "localhost"], "--listen: must be HOST:PORT"),
    "no host": (["--listen", ":6378"], "--listen: must be HOST:PORT"),
    "port": (["--http", "127.0.0.1:70000"], "--http: the port must be a number from 0 to 65535"),
    "bare v6": (["--listen", "::1:6378"], "--listen: needs brackets around an IPv6 address"),
    "beyond loopback": (["--listen", "0.0.0.0:6378"], "add --insecure to allow it, or listen on 127.0.0.1"),
    "http beyond": (["--http", "[::]:9464"], "--http [::]:9464: beyond loopback, anyone"),
    "redis": (["--store", "redis://a,b"], "--store: several servers need the scheme of a Cluster, redis+cluster://"),
    "redis port": (["--store", "redis://a:port"], "--store: a server is not of the form host:port"),
    "redis option": (["--store", "redis://u:secret@a?copies=2"], "--store: unknown option after the ?; known are"),
    "redis cluster": (["--store", "redis+cluster://a/1"], "--store: database: must be 0, the only one of a Cluster"),
    "store": (["--store", "files"], "--store: unknown store; use sqlite, redis://HOST:PORT or"),
    "zero": (["--history-epochs", "0"], "--history-epochs: input should be greater than or equal to 1, is '0'"),
    "less than no thread": (["--threads", "-1"], "--threads: input should be greater than or equal to 0, is '-1'"),
    "threads": (["--threads", "65"], "--threads: input should be less than or equal to 64, is '65'"),
    "below nothing": (["--namespace-tokens", "-1"], "--namespace-tokens: input should be greater than or equal to 0"),
    "too much text": (["--namespace-tokens", "2000000000"], "input should be less than or equal to 1073741824"),
    "number": (["--max-batch", "many"], "--max-batch: input should be a valid integer"),
    "choice": (["--log-format", "xml"], "--log-format: input should be 'auto', 'pretty' or 'json', is 'xml'"),
    "traces": (["--traces", "a:4317"], "--traces: must be otlp://HOST:PORT, for example otlp://127.0.0.1:4317, is"),
    "endless file": (["--config", "/dev/zero"], "--config /dev/zero: cannot be read (File too large)"),
    "peers": (["--peers", "a:1,a:1"], "--peers: must name each shard once"),
    "flag": (["--memroy", "8GiB"], "unrecognized arguments: --memroy; see histospec serve --help"),
    "no value": (["--memory"], "argument --memory: expected one argument"),
    "shortened": (["--mem", "8GiB"], "unrecognized arguments"),
    "more epochs than there are": (["--history-epochs", "3000000000"], "less than or equal to 2147483647, is '3000"),
    "more than a machine": (
        ["--memory", "16EiB"],
        "--memory: '16EiB' is larger than the address space of a process; give at most",
    ),
    "endless disk": (
        ["--disk", "99999999999999999999EiB"],
        "is larger than the address space of a process; give at most 128TiB",
    ),
    "endless backlog": (["--max-backlog", "1e30"], "--max-backlog: '1e30' is not a size"),
    "infinite": (["--memory", "inf"], "--memory: 'inf' is not a size; give a number with a unit"),
    "not a number": (["--memory", "nan"], "--memory: 'nan' is not a size; give a number with a unit"),
    "no end": (["--drain-seconds", "inf"], "--drain-seconds: input should be less than or equal to 86400, is 'inf'"),
    "late": (["--drain-seconds", "1e18"], "--drain-seconds: input should be less than or equal to 86400, is '1e18'"),
    "undefined": (["--drain-seconds", "nan"], "--drain-seconds: input should be"),
    "kept for good": (["--retention", "inf"], "--retention: input should be less than or equal to 36500, is 'inf'"),
    "long drafts": (["--max-draft-tokens", "1025"], "--max-draft-tokens: input should be less than or equal to 1024"),
    "large batch": (["--max-batch", "99999999999999999999"], "--max-batch: input should be less than or equal to 2147"),
    "large session": (["--max-session-tokens", "99999999999999999999"], "should be less than or equal to 2147483647"),
    "endless number": (["--max-batch", "9" * 5000], "--max-batch: "),
    "other digits": (
        ["--listen", "127.0.0.1:\uff16\uff10\uff10\uff10"],
        "--listen: the port must be a number from 0 to 65535",
    ),
    "endless port": (["--listen", f"a:{'1' * 5000}"], "--listen: the port must be a number from 0 to 65535"),
    "commas": (["--peers", ",,,"], "--peers: ',,,' names no shard; give a list such as a:6378,b:6378, or omit it"),
    "no directory": (["--data-dir", ""], "--data-dir: must not be empty; give a directory"),
    "two lines": (["--shard-name", "a\nb"], "--shard-name: 'a\\nb' has characters that cannot be printed"),
    "long name": (["--shard-name", "x" * 100_000], "--shard-name: has 100000 characters; must have at most 253"),
    "endless tokens": (["--tokens", "/dev/zero"], "--tokens: /dev/zero is a device; give a file"),
    "endless key": (["--tls-cert", "a", "--tls-key", "/dev/zero"], "--tls-key: /dev/zero is a device; give a file"),
    "file": (["--config", "/nowhere.toml"], "--config /nowhere.toml: cannot be read (No such file or directory)"),
}


@pytest.mark.parametrize(("argv", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_in_one_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_long_value_is_cut_and_what_to_do_is_said() -> None:
    with pytest.raises(
        ConfigError, match=r"^--memory: '1+'… of 100001 characters is not a size; give a number with a unit"
    ) as caught:
        load(["--memory", "1" * 100_000 + "x"])
    assert len(str(caught.value)) < 400


def test_the_longest_draft_is_the_engines_own() -> None:
    engine = Engine(1 << 20)
    nothing, offsets = np.empty(0, np.int64), np.zeros(1, np.int64)
    longest = load(["--max-draft-tokens", str(MAX_DRAFT)]).max_draft_tokens
    engine.step(nothing, np.empty(0, np.int32), offsets, max_tokens=longest)
    with pytest.raises(ValueError, match="max_tokens"):
        engine.step(nothing, np.empty(0, np.int32), offsets, max_tokens=longest + 1)


@pytest.mark.parametrize("flag", ["--history-epochs", "--memory", "--threads", "--namespace-tokens"])
def test_what_is_taken_at_its_largest_is_taken_by_the_engine(flag: str) -> None:
    name = flag[2:].replace("-", "_")
    largest = {"memory": MAX_BYTES, "history_epochs": MAX_COUNT, "threads": 64, "namespace_tokens": 1 << 30}[name]
    config = load([flag, str(largest)])
    Engine(
        config.memory,
        history_epochs=config.history_epochs,
        threads=config.threads or 1,
        namespace_tokens=config.namespace_tokens,
    )


def test_the_sentence_names_where_a_value_came_from(
    file: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file('drain-seconds = "soon"')
    with pytest.raises(ConfigError, match=rf"^--drain-seconds \(from {path}\): input should be a valid number"):
        load(["--config", path])
    monkeypatch.setenv("HISTOSPEC_DRAIN_SECONDS", "-1")
    with pytest.raises(ConfigError, match=r"^--drain-seconds \(from HISTOSPEC_DRAIN_SECONDS\): input"):
        load(["--config", path])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('memroy = "8GiB"', "unknown option 'memroy'"),
        ("memory = ", "is not TOML"),
        ("max-batch = 1\nmax_batch = 2", "an option appears twice"),
        ("[server]\nmemory = 1", "unknown option 'server'"),
    ],
)
def test_a_wrong_file_is_refused(file: Callable[[str], str], text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(["--config", file(text)])


def serve(cwd: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "histospec.server", "serve", "--data-dir", "data", *flags]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)
    return result.returncode, result.stderr


def test_a_configuration_error_stops_the_process_with_2_and_no_traceback(tmp_path: Path) -> None:
    code, text = serve(tmp_path, "--memory", "lots")
    assert code == 2
    assert text.startswith("histospec serve: --memory: 'lots' is not a size")
    assert text.count("\n") == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(("flag", "other"), [("--listen", "--http"), ("--http", "--listen")])
def test_a_port_in_use_is_said(tmp_path: Path, flag: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = serve(tmp_path, flag, address, other, "127.0.0.1:0")
    assert code == 2
    assert (
        text == f"histospec serve: {flag}: cannot listen on {address} (address already in use); give another address\n"
    )


def test_a_data_directory_in_use_is_said(server: Server) -> None:
    code, text = serve(server.data_dir, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--data-dir", ".")
    assert (code, text) == (
        2,
        "histospec serve: --data-dir .: another server uses it; stop that one or give another\n",
    )


def test_a_data_directory_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    code, text = serve(tmp_path, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert code == 2
    assert text.startswith("histospec serve: --data-dir data: ")
    assert text.count("\n") == 1


def test_the_configuration_page_says_what_the_code_does() -> None:
    script = Path(__file__).parents[2] / "scripts" / "configuration.py"
    checked = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert (
        "`--max-prompt-tokens` | `HISTOSPEC_MAX_PROMPT_TOKENS` | `1048576`"
        in (script.parents[1] / "docs" / "configuration.md").read_text()
    )
