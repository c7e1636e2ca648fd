"""The installed vLLM has what the adapter depends on, and wrong settings fail at the start."""

import inspect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from histospec.client.vllm import releases
from scripts import vllm_versions
from scripts.vllm_sources import Sources
from tests.support.engines import StartEngine

pytestmark = pytest.mark.vllm


@pytest.fixture
def adapter() -> Any:
    pytest.importorskip("vllm", reason="needs a vLLM build in the environment")
    from histospec.client import vllm

    return vllm


def test_the_scheduler_extends_methods_that_exist(adapter: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    ours = [n for n, m in vars(adapter.HistoSpecScheduler).items() if inspect.isfunction(m) and not _private(n)]
    assert "update_draft_token_ids" in ours
    for name in [*ours, "_free_request"]:
        theirs = inspect.signature(getattr(Scheduler, name)).parameters
        taken = inspect.signature(getattr(adapter.HistoSpecScheduler, name)).parameters
        if not any(p.kind is p.VAR_POSITIONAL for p in taken.values()):
            assert list(taken) == list(theirs), name


@pytest.fixture
def installed(adapter: Any) -> Path:
    """The folder that holds the installed vLLM."""
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def test_the_installed_release_is_the_recorded_one(installed: Path) -> None:
    import vllm

    version = vllm.__version__.partition("+")[0]
    assert version in (*releases.TESTED, *releases.TESTED_WITH_V2)
    assert vllm_versions.look(Sources(installed)) == vllm_versions.Record.load().found[version]


def test_the_check_finds_everything_in_the_installed_release(
    installed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vllm_versions.main([str(installed)]) == 0
    assert "finds the" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "v1/core/sched/scheduler.py",
            "def update_draft_token_ids(self, draft_token_ids: DraftTokenIds)",
            "def update_draft_token_ids(self, draft_token_ids: DraftTokenIds, step: int)",
            "missing   vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        ),
        (
            "v1/core/sched/utils.py",
            "last_token_id == sampling_params.eos_token_id",
            "last_token_id != sampling_params.eos_token_id",
            "unread    vllm.v1.core.sched.utils:check_stop",
        ),
        (
            "v1/sample/rejection_sampler.py",
            "def rejection_sample(",
            "def another_sample(",
            "missing   vllm.v1.sample.rejection_sampler:rejection_sample",
        ),
        (
            "v1/spec_decode/metadata.py",
            "num_draft_tokens: list[int]",
            "num_drafted: list[int]",
            "missing   vllm.v1.spec_decode.metadata:SpecDecodeMetadata.num_draft_tokens",
        ),
    ],
    ids=["signature", "body", "function", "attribute"],
)
def test_the_check_fails_if_a_release_changes(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, old: str, new: str, said: str
) -> None:
    changed = changed_copy(installed / "vllm", tmp_path / "vllm", file, old, new)
    assert vllm_versions.main([str(changed.parent)]) == 1
    assert said in capsys.readouterr().out.splitlines()


def changed_copy(folder: Path, copy: Path, file: str, old: str, new: str) -> Path:
    """Makes a copy of a folder, of links, in which one file has another text in place of `old`."""
    copy.mkdir()
    name, _, rest = file.partition("/")
    for path in folder.iterdir():
        if path.name != name:
            (copy / path.name).symlink_to(path)
    if rest:
        changed_copy(folder / name, copy / name, rest, old, new)
    else:
        text = (folder / name).read_text()
        assert text.count(old) == 1
        (copy / name).write_text(text.replace(old, new))
    return copy


def _private(name: str) -> Any:
    return name.startswith("_")


def test_a_proposer_without_the_scheduler_says_what_to_add(adapter: Any, engine: StartEngine, nowhere: str) -> None:
    with pytest.raises(Exception, match="--scheduler-cls histospec"):
        engine(nowhere, fresh=True, scheduler_cls=None)


def test_a_scheduler_without_the_proposer_says_what_to_add(adapter: Any, engine: StartEngine, nowhere: str) -> None:
    with pytest.raises(ValueError, match="it needs 'custom_class' with the model"):
        engine(nowhere, fresh=True, speculative_config=None)


def test_a_verify_cost_that_is_no_number_is_refused(
    adapter: Any, engine: StartEngine, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HISTOSPEC_VERIFY_COST", "cheap")
    with pytest.raises(Exception, match="HISTOSPEC_VERIFY_COST"):
        engine(nowhere, fresh=True)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("SAMPLING", "paired", "expected 'vllm' or 'coupled', got 'paired'"),
        ("SEED_REFRESH", "1.5", "expected a share from 0 to 1, got 1.5"),
        ("SEED_REFRESH", "half", "expected a number, got 'half'"),
        ("SEED_MAX_AGE", "0", "expected at least 1 visit, got 0"),
        ("SEED_EVERY", "0.5", "expected a number, got '0.5'"),
    ],
)
def test_how_to_sample_is_said_clearly(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str) -> None:
    from histospec.client.vllm.config import AdapterConfig

    monkeypatch.setenv("HISTOSPEC_SAMPLING", "coupled")
    monkeypatch.setenv(f"HISTOSPEC_{name}", value)
    with pytest.raises(ValueError, match=f"^HISTOSPEC_{name}: {said}$"):
        AdapterConfig.from_environment()
